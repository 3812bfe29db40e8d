"""How large a drafter's plans, its builder and its cache get, computed from its shape alone."""

from __future__ import annotations

from dataclasses import dataclass

from dspine_export.recipes.schema import Profile

BUILDER_PEAK_FACTOR = 3.2  # times the larger plan, measured with TensorRT-RTX 1.7.1
BUILDER_BASE_BYTES = 400_000_000
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class DrafterShape:
    """The sizes that decide memory; symbols in brackets are the paper's. ``rank`` and ``message_size`` are 0 without injection."""

    hidden_size: int  # [d]
    vocab_size: int  # [V]
    num_layers: int  # [L]
    num_taps: int  # [A]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rank: int  # [r]
    message_size: int  # [m]


@dataclass(frozen=True)
class MemoryEstimate:
    """All in bytes. ``shared_with_target`` counts embed_tokens and lm_head, which the runtime binds and the plans do not hold."""

    context_plan: int
    draft_plan: int
    builder_peak: int
    cache: int
    shared_with_target: int

    @property
    def plans(self) -> int:
        """Both plans together."""
        return self.context_plan + self.draft_plan


def estimate_memory(shape: DrafterShape, profile: Profile, dtype: str) -> MemoryEstimate:
    """Estimate for one drafter under one profile; the cache is taken at the profile's maximum batch and context."""
    size, d = DTYPE_BYTES[dtype], shape.hidden_size
    keys_values = 2 * shape.num_kv_heads * shape.head_dim
    context = shape.num_taps * d * d + shape.num_layers * keys_values * d
    attention = (2 * shape.num_heads * shape.head_dim + keys_values) * d
    layers = shape.num_layers * (attention + 3 * d * shape.intermediate_size)
    writes = shape.num_layers * d * (shape.rank + shape.message_size)
    folded = (
        3 * shape.message_size * shape.rank + 2 * shape.vocab_size * shape.message_size
    )  # token table replaces the codes
    draft = layers + writes + folded
    cache = shape.num_layers * keys_values * profile.batch.max * profile.context.max
    return MemoryEstimate(
        context_plan=context * size,
        draft_plan=draft * size,
        builder_peak=int(BUILDER_PEAK_FACTOR * max(context, draft) * size) + BUILDER_BASE_BYTES,
        cache=cache * size,
        shared_with_target=2 * shape.vocab_size * d * size,
    )
