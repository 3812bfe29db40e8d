"""What a validated drafter configuration looks like, whatever format it came from.

Symbols follow the DSpine paper: d `hidden_size`, L `num_layers`, A taps, B `block_size`, r `rank`, m `message_size`, K `top_k`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["specforge", "reference", "dflash"]

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
CANONICAL_TRANSFER_BASIS = "eigh-float64-canonical-v1"
PROBE_ROWS = 32
PROBE_COMPONENTS = 8


@dataclass(frozen=True)
class TransferProbe:
    """Fingerprint that recomputed transfer codes must reproduce: token ids and the first components of their codes."""

    token_ids: tuple[int, ...]
    components: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class TransferConfig:
    """Sizes of the transfer space, and the declaration that allows its codes to be recomputed from an lm_head."""

    rank: int
    message_size: int
    top_k: int
    basis: str | None = None
    probe: TransferProbe | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's architecture, in the same terms for every layout.

    `target_layer_ids` holds indices a of target layers whose *output* is tapped (`hidden_states[a + 1]` in Hugging Face terms), in the
    order in which `fc.weight` concatenates them. `transfer` is None for a DFlash drafter.
    """

    layout: Layout
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    is_causal: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None
    dtype: str | None
    transfer: TransferConfig | None

    @property
    def is_dspine(self) -> bool:
        """Whether adjacent injection and predecessor-conditioned refinement are part of the model."""
        return self.transfer is not None

    @property
    def num_taps(self) -> int:
        """A: how many target layers feed the context projection."""
        return len(self.target_layer_ids)

    def attention_window(self, layer: int) -> int | None:
        """Window of layer `layer` in positions (visible iff `q_pos - k_pos < window`), or None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING_ATTENTION else None
