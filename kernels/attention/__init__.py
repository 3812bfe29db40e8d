"""Block attention over a ragged context cache, and the append of context rows, with q/k norm and rotary embedding fused."""

from dspine_kernels.attention.append import append_context
from dspine_kernels.attention.block import block_attention
from dspine_kernels.attention.reference import append_context_reference, block_attention_reference
from dspine_kernels.attention.store import store_context

__all__ = [
    "append_context",
    "append_context_reference",
    "block_attention",
    "block_attention_reference",
    "store_context",
]
