"""``dspine_vllm::block_injection``: adjacent injection and the norm behind it as one operator, opaque to torch.compile.

Rows are flattened uniform blocks: row ``n * block + i`` is slot i of sequence n. CUDA runs the fused kernels, everything else the eager
model's functions. Symbols: N sequences, B block, d hidden, r rank, m message, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dspine_export.model.injection import inject, predicted_feature
from dspine_export.vllm.fused_messages import fused_messages

_SCHEMA = (
    "block_injection(Tensor hidden, Tensor anchor_ids, Tensor readout, Tensor gates, Tensor bias, Tensor token_table, "
    "Tensor write, Tensor norm_weight, float eps, int block) -> (Tensor, Tensor)"
)


def block_injection(
    hidden: Tensor,
    anchor_ids: Tensor,
    readout: Tensor,
    gates: Tensor,
    bias: Tensor,
    token_table: Tensor,
    write: Tensor,
    norm_weight: Tensor,
    eps: float,
    block: int,
) -> tuple[Tensor, Tensor]:
    """One layer's injection.

    Args:
        hidden: [N*B, d] output of the whole decoder layer.
        anchor_ids: integers [N].
        readout [r, d], gates [3m, r] (G_r, G_p, M), bias [m], token_table [V, 2m], write [d, m]: see `FoldedInjection`.
        norm_weight: [d], gain of the RMSNorm that reads the result.

    Returns:
        injected and its norm, both [N*B, d].
    """
    operator = torch.ops.dspine_vllm.block_injection
    return operator(hidden, anchor_ids, readout, gates, bias, token_table, write, norm_weight, eps, block)


def _eager(
    hidden: Tensor, anchor_ids: Tensor, readout: Tensor, gates: Tensor, bias: Tensor, token_table: Tensor,
    write: Tensor, norm_weight: Tensor, eps: float, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    slots = hidden.view(-1, block, hidden.shape[-1])
    receiver, predecessor, message = gates.chunk(3)
    anchors = F.embedding(anchor_ids, token_table)
    feature = predicted_feature(slots, readout)
    injected = inject(slots, feature, anchors, message, receiver, predecessor, bias, write).view(hidden.shape)
    return injected, F.rms_norm(injected, norm_weight.shape, norm_weight, eps)


def _fused(
    hidden: Tensor, anchor_ids: Tensor, readout: Tensor, gates: Tensor, bias: Tensor, token_table: Tensor,
    write: Tensor, norm_weight: Tensor, eps: float, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from dspine_kernels.rows import write_and_norm

    z, _ = fused_messages(hidden, readout, gates, bias, token_table, anchor_ids, block)
    injected, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    squares = torch.empty(hidden.shape[0], device=hidden.device)
    write_and_norm(hidden, torch.mm(z, write.T), norm_weight, eps, block, injected, normed, squares)
    return injected, normed


def _fake(hidden: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(hidden)


_library = torch.library.Library("dspine_vllm", "FRAGMENT")
_library.define(_SCHEMA)
_library.impl("block_injection", _eager, "CPU")
_library.impl("block_injection", _fused, "CUDA")
torch.library.register_fake("dspine_vllm::block_injection", _fake, lib=_library)
