"""Growing and thinning out a drafter's context cache, the same for every executor.

The cache is `model.state.DraftState`, keys and values [N, L, Hkv, C, D]. C grows in steps: a draft pass attends all C columns (those at
or beyond a sequence's length are masked), so a cache much larger than the text would be paid for in every pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.model.state import DraftState

GROWTH_STEP = 256


@torch.inference_mode(
    False
)  # a cache outlives the mode it was made in, and tensors of inference mode cannot be written outside
def empty_state(config: DrafterConfig, batch: int, columns: int, like: Tensor) -> DraftState:
    """A cache without committed tokens, in the dtype and on the device of `like`."""
    shape = (batch, config.num_layers, config.num_kv_heads, columns, config.head_dim)
    keys, values = like.new_zeros(shape), like.new_zeros(shape)
    return DraftState(keys, values, torch.zeros(batch, dtype=torch.int64, device=like.device))


def rounded(columns: int, limit: int | None, least: int = 1) -> int:
    """The capacity to allocate for `columns`: the next step, within the sizes the executor can run."""
    steps = max(1, -(-max(columns, least) // GROWTH_STEP)) * GROWTH_STEP
    return steps if limit is None else min(steps, limit)


@torch.inference_mode(False)
@torch.no_grad()
def reserve(state: DraftState, columns: int, limit: int | None) -> None:
    """Makes room for `columns` committed tokens per sequence, in place; committed rows are kept.

    Raises:
        UsageError: more than `limit`, the most the executor can run.
    """
    if limit is not None and columns > limit:
        raise UsageError(
            "The context is longer than this drafter executor can hold",
            got=f"{columns} tokens",
            expected=f"at most {limit}",
            fix="build the engine with a larger --max-seq-len, or stop drafting at this length",
        )
    if columns <= state.capacity:
        return
    used = state.capacity
    for name in ("keys", "values"):
        old = getattr(state, name)
        shape = list(old.shape)
        shape[3] = rounded(columns, limit)
        new = old.new_zeros(shape)  # unused columns are masked, but must be finite
        new[:, :, :, :used] = old
        setattr(state, name, new)


def select_rows(state: DraftState, rows: Tensor, columns: int | None = None) -> DraftState:
    """The sequences `rows` (int64 [M]) of a batch, copied; of their cache the first `columns` only."""
    keys, values = (cache[:, :, :, :columns][rows] for cache in (state.keys, state.values))
    return DraftState(keys, values, state.lengths[rows])


def store_rows(state: DraftState, rows: Tensor | None, keys: Tensor, values: Tensor, counts: Tensor) -> None:
    """Stores the first counts[n] of T new columns behind sequence rows[n] (None: n) and advances its length.

    keys, values [N, L, Hkv, T, D]; counts int64 [N]; there must be room, see `reserve`.
    """
    if rows is None:
        state.append(keys, values, counts)
        return
    column = torch.arange(keys.shape[3], device=keys.device)
    sequence, source = (column < counts[:, None]).nonzero(as_tuple=True)
    slot = rows[sequence]
    target = state.lengths[slot] + source
    state.keys[slot, :, :, target] = keys[sequence, :, :, source]
    state.values[slot, :, :, target] = values[sequence, :, :, source]
    state.lengths = state.lengths.index_add(0, rows, counts)
