"""What runs a drafter: one protocol, and the bookkeeping that every implementation shares.

An executor turns tapped target states into cached keys and values (`append_context`) and the cache into drafted blocks (`draft_from`).
The cache belongs to the caller; block rows never enter it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.model.output import DraftOutput
from dspine_export.model.state import DraftState
from dspine_export.runtime.context_cache import empty_state, reserve, rounded, select_rows


class DrafterExecutor(Protocol):
    """A drafter that can be run. Symbols: N sequences, T tokens, A taps, d hidden size, B block size, K candidates.

    `max_context` and `max_batch` are limits of a compiled plan, None where there are none.
    """

    name: str
    config: DrafterConfig
    max_context: int | None
    max_batch: int | None

    def new_state(self, batch: int, capacity: int = 0) -> DraftState:
        """An empty cache; `capacity` is a hint, the cache grows by itself."""

    def append_context(self, state: DraftState, target_hidden: Tensor, counts: Tensor) -> None:
        """Commits the first counts[n] of T rows. target_hidden [N, T, A*d], counts int64 [N]"""

    def draft_from(self, state: DraftState, anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor) -> DraftOutput:
        """One block per sequence. anchor_ids int64 [N], temperature float32 [N], uniforms float32 [N, B-1] in [0, 1)."""

    def truncate(self, state: DraftState, lengths: Tensor) -> None:
        """Rolls every sequence back to lengths[n] committed tokens."""

    def select(self, state: DraftState, rows: Tensor) -> DraftState:
        """Keeps the sequences `rows`, int64 [M], of a batch."""


class CachedExecutor(ABC):
    """Cache handling around two computations: `project` (states to keys and values) and `draft_from`.

    Args:
        like: any tensor with the dtype and device of the cache.
        min_context, max_context: cache columns that `draft_from` can attend. max_batch: sequences at once.
        max_tokens: most rows `project` takes at once; longer appends are cut up.
    """

    name = ""

    def __init__(
        self,
        config: DrafterConfig,
        like: Tensor,
        *,
        min_context: int = 1,
        max_context: int | None = None,
        max_batch: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.config = config
        self.max_context, self.max_batch, self.max_tokens = max_context, max_batch, max_tokens
        self._like, self._min_context = like, min_context

    @abstractmethod
    def project(self, target_hidden: Tensor, start_positions: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values [N, L, Hkv, T, D] of target_hidden [N, T, A*d] at start_positions[n] + t."""

    @abstractmethod
    def draft_from(self, state: DraftState, anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor) -> DraftOutput:
        """See `DrafterExecutor.draft_from`."""

    @torch.no_grad()
    def new_state(self, batch: int, capacity: int = 0) -> DraftState:
        if batch < 1 or (self.max_batch is not None and batch > self.max_batch):
            most = "any number" if self.max_batch is None else f"at most {self.max_batch}"
            raise UsageError(
                "This drafter executor cannot run that many sequences",
                got=batch,
                expected=f"at least 1 and {most}",
                fix=None if self.max_batch is None else "build the engine with a larger --max-batch-size",
            )
        columns = rounded(capacity, self.max_context, self._min_context)
        return empty_state(self.config, batch, columns, self._like)

    @torch.no_grad()
    def append_context(self, state: DraftState, target_hidden: Tensor, counts: Tensor) -> None:
        counts = counts.to(state.lengths)
        self._check_append(state, target_hidden, counts)
        reserve(state, int((state.lengths + counts).max()), self.max_context)
        step = self.max_tokens or target_hidden.shape[1]
        for start in range(0, int(counts.max()), max(step, 1)):
            rows = target_hidden[:, start : start + step]
            keys, values = self.project(rows.to(self._like), state.lengths)
            state.append(keys, values, (counts - start).clamp(0, rows.shape[1]))

    def truncate(self, state: DraftState, lengths: Tensor) -> None:
        state.truncate(lengths.to(state.lengths))

    @torch.no_grad()
    def select(self, state: DraftState, rows: Tensor) -> DraftState:
        return select_rows(state, rows)

    def _check_append(self, state: DraftState, target_hidden: Tensor, counts: Tensor) -> None:
        shape = tuple(target_hidden.shape)
        width = self.config.num_taps * self.config.hidden_size
        if len(shape) != 3 or shape[0] != state.batch or shape[2] != width:
            expected = f"[{state.batch}, T, {width}]"
            raise UsageError("Target hidden states have the wrong shape", got=list(shape), expected=expected)
        if counts.shape != (state.batch,) or bool(((counts < 0) | (counts > shape[1])).any()):
            expected = f"[{state.batch}] values in 0 .. {shape[1]}"
            raise UsageError("Counts do not fit the hidden states", got=counts.tolist(), expected=expected)
