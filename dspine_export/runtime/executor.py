"""What runs a drafter: one protocol, and the bookkeeping that every implementation shares.

An executor turns tapped target states into cached keys and values (`append_context`) and the cache into drafted blocks (`draft_from`).
The cache belongs to the caller; block rows never enter it.

Two ways to hold sequences. A fixed batch: `new_state`, then every call concerns all of it, and `select` drops finished sequences.
Continuous batching: `new_slots` makes a cache of S slots once; every call names the slots it is about (`rows`), in any order, and `reset`
empties a slot for the next sequence:

    state = executor.new_slots(64, context_capacity=4096)
    executor.append_context(state, hidden, counts, rows=[5])            # a prompt arrives in slot 5
    executor.draft_from(state, anchors, heat, uniforms, rows=[0, 5])    # slots 0 and 5 draft in one batch
    executor.reset(state, rows=[5])                                     # the sequence in slot 5 has ended
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.model.output import DraftOutput
from dspine_export.model.state import DraftState
from dspine_export.runtime.context_cache import empty_state, reserve, rounded, select_rows, store_rows
from dspine_export.runtime.slot_rows import Rows, row_index


class ContextState(Protocol):
    """The committed context of some sequences, made and changed by one executor. `lengths` int64 [N] are committed tokens."""

    @property
    def lengths(self) -> Tensor: ...

    @property
    def batch(self) -> int: ...


class DrafterExecutor(Protocol):
    """A drafter that can be run. Symbols: N sequences, T tokens, A taps, d hidden size, B block size, K candidates.

    N is the number of `rows`: distinct slots of the state, as integers on the host (a tensor is read back); None are all, in order.
    `max_context` and `max_batch` (rows of one call) are limits of a compiled plan, None where there are none. `attends_capacity`: a draft
    reads all columns of the cache, so one much larger than its text is paid for; otherwise growing is what costs.
    """

    name: str
    config: DrafterConfig
    max_context: int | None
    max_batch: int | None
    attends_capacity: bool

    def new_state(self, batch: int, capacity: int = 0) -> Any:
        """An empty cache for a batch; `capacity` (tokens) is a hint, the cache grows by itself."""

    def new_slots(self, slots: int, context_capacity: int = 0) -> Any:
        """As `new_state`, but `slots` may exceed `max_batch`: calls then name at most so many rows."""

    def append_context(self, state: Any, target_hidden: Tensor, counts: Tensor, rows: Rows = None) -> None:
        """Commits the first counts[n] of T rows. target_hidden [N, T, A*d], counts int64 [N]"""

    def draft_from(
        self, state: Any, anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor, rows: Rows = None
    ) -> DraftOutput:
        """One block per sequence. anchor_ids int64 [N], temperature float32 [N], uniforms float32 [N, B-1] in [0, 1).

        The output may live in buffers that the executor's next call overwrites: use it, or copy it, before.
        """

    def truncate(self, state: Any, lengths: Tensor, rows: Rows = None) -> None:
        """Rolls every sequence back to lengths[n] committed tokens."""

    def at_most(self, state: Any, lengths: Sequence[int], rows: Rows = None) -> None:
        """The caller knows, without asking the device, that these slots hold at most lengths[n] tokens from now on."""

    def reset(self, state: Any, rows: Rows = None) -> None:
        """Forgets the sequences of these slots: they are empty again."""

    def select(self, state: Any, rows: Tensor) -> Any:
        """The sequences `rows`, int64 [M], as a state of their own that replaces `state`, which must not be used after it."""


class CachedExecutor(ABC):
    """Cache handling around two computations: `project` (states to keys and values) and `draft`.

    Args:
        like: any tensor with the dtype and device of the cache.
        min_context, max_context: cache columns that `draft` can attend. max_batch: sequences at once.
        max_tokens: most rows `project` takes at once; longer appends are cut up.
    """

    name = ""
    attends_capacity = True

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
    def draft(self, state: DraftState, anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor) -> DraftOutput:
        """One block for every sequence of `state`, as `DrafterExecutor.draft_from`."""

    def new_state(self, batch: int, capacity: int = 0) -> DraftState:
        self._check_batch(batch)
        return self.new_slots(batch, capacity)

    @torch.no_grad()
    def new_slots(self, slots: int, context_capacity: int = 0) -> DraftState:
        if slots < 1:
            raise UsageError("A cache needs at least one slot", where="new_slots", got=slots)
        columns = rounded(context_capacity, self.max_context, self._min_context)
        return empty_state(self.config, slots, columns, self._like)

    @torch.no_grad()
    def append_context(self, state: DraftState, target_hidden: Tensor, counts: Tensor, rows: Rows = None) -> None:
        index = self._index(state, rows)
        lengths = state.lengths if index is None else state.lengths[index]
        counts = counts.to(lengths)
        self._check_append(len(lengths), target_hidden, counts)
        reserve(state, int((lengths + counts).max()), self.max_context)
        step = self.max_tokens or target_hidden.shape[1]
        for start in range(0, int(counts.max()), max(step, 1)):
            piece = target_hidden[:, start : start + step]
            taken = (counts - start).clamp(0, piece.shape[1])
            keys, values = self.project(piece.to(self._like), lengths)
            store_rows(state, index, keys, values, taken)
            lengths = lengths + taken

    @torch.no_grad()
    def draft_from(
        self, state: DraftState, anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor, rows: Rows = None
    ) -> DraftOutput:
        index = self._index(state, rows)
        if index is not None:
            longest = rounded(int(state.lengths[index].max()), self.max_context, self._min_context)
            state = select_rows(state, index, longest)
        return self.draft(state, anchor_ids, temperature, uniforms)

    def truncate(self, state: DraftState, lengths: Tensor, rows: Rows = None) -> None:
        lengths = lengths.to(state.lengths)
        index = row_index(rows, state.batch, state.lengths.device)
        if index is not None:
            if lengths.shape != index.shape:
                raise UsageError("One length per row", where="truncate", got=list(lengths.shape), expected=len(index))
            lengths = state.lengths.index_copy(0, index, lengths)
        state.truncate(lengths)

    def at_most(self, state: DraftState, lengths: Sequence[int], rows: Rows = None) -> None:  # noqa: B027
        """Nothing to keep: `append_context` reads the lengths each time."""

    def reset(self, state: DraftState, rows: Rows = None) -> None:
        index = row_index(rows, state.batch, state.lengths.device)
        lengths = state.lengths
        state.lengths = torch.zeros_like(lengths) if index is None else lengths.index_fill(0, index, 0)

    @torch.no_grad()
    def select(self, state: DraftState, rows: Tensor) -> DraftState:
        return select_rows(state, rows)

    def _index(self, state: DraftState, rows: Rows) -> Tensor | None:
        index = row_index(rows, state.batch, state.lengths.device)
        self._check_batch(state.batch if index is None else len(index))
        return index

    def _check_batch(self, batch: int) -> None:
        if batch < 1 or (self.max_batch is not None and batch > self.max_batch):
            most = "any number" if self.max_batch is None else f"at most {self.max_batch}"
            raise UsageError(
                "This drafter executor cannot run that many sequences",
                got=batch,
                expected=f"at least 1 and {most}",
                fix=None if self.max_batch is None else "build the engine with a larger --max-batch-size",
            )

    def _check_append(self, batch: int, target_hidden: Tensor, counts: Tensor) -> None:
        shape = tuple(target_hidden.shape)
        width = self.config.num_taps * self.config.hidden_size
        if len(shape) != 3 or shape[0] != batch or shape[2] != width:
            expected = f"[{batch}, T, {width}]"
            raise UsageError("Target hidden states have the wrong shape", got=list(shape), expected=expected)
        if counts.shape != (batch,) or bool(((counts < 0) | (counts > shape[1])).any()):
            expected = f"[{batch}] values in 0 .. {shape[1]}"
            raise UsageError("Counts do not fit the hidden states", got=counts.tolist(), expected=expected)
