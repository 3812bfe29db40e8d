"""The drafter over the slots of an engine: who drafts how much, from which context. Symbols as in `slot_models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspine_export.runtime.device_copy import to_device
from dspine_export.runtime.executor import DrafterExecutor
from dspine_export.runtime.proposal import first_slots
from dspine_export.runtime.serving.stream import Stream


class Proposal(NamedTuple):
    """tokens int64 [N, T-1], candidate_ids int64 and q float32 [N, T-1, K]."""

    tokens: Tensor
    candidate_ids: Tensor
    q: Tensor


class SlotDrafter:
    """A drafter's executor with a cache of S slots, `room` tokens each.

    Attributes:
        lengths: committed context tokens by slot, as the host knows them.
    """

    def __init__(self, executor: DrafterExecutor, slots: int, room: int, device: torch.device) -> None:
        self.executor, self.block_size, self._device = executor, executor.config.block_size, device
        self.limit = executor.max_context
        self._room = room if self.limit is None else min(room, self.limit)
        self._contexts = executor.new_slots(slots, self._room)
        self.lengths = [0] * slots
        self._greedy = torch.zeros(slots, device=device), torch.zeros(slots, self.block_size - 1, device=device)

    def drafts_for(self, prompt_tokens: int) -> int:
        """Most tokens that can be drafted behind a prompt of this length."""
        too_long = self.limit is not None and prompt_tokens + self.block_size > self.limit
        return 0 if too_long else self.block_size - 1

    def foresees(self, streams: Sequence[Stream]) -> bool:
        """Whether one more round can be queued behind those that have not been read, whatever these bring."""
        if self.limit is None:
            return True
        waiting = [stream for stream in streams if stream.draft_tokens and stream.unread]
        return all(self.lengths[s.slot] + (s.unread + 1) * self.block_size <= self.limit for s in waiting)

    def most(self, stream: Stream) -> int:
        """Tokens to draft for a stream in its next round; at most so many behind rounds that have not been read."""
        if not stream.draft_tokens:
            return 0
        if not stream.unread:
            if self.limit is not None and self.lengths[stream.slot] + self.block_size > self.limit:
                stream.draft_tokens = 0  # for good: its context is no longer kept up to date
                return 0
            if stream.anchor >= self.executor.config.vocab_size:  # a padded head has rows the drafter does not know
                return 0
        return max(0, min(stream.draft_tokens, stream.sequence.remaining - stream.unread - 1))

    def draft(self, streams: Sequence[Stream], anchors: Tensor, where: Sequence[int], width: int) -> Proposal:
        """Blocks of `width` tokens for all rows of a pass over `streams`; only rows `where` hold drafts. anchors int64 [N]"""
        index = None if len(where) == len(streams) else to_device(torch.tensor(where), anchors.device)
        chosen = anchors if index is None else anchors[index]
        drafting = streams if index is None else [streams[n] for n in where]
        heat, draws = self._rules(drafting)
        parts: list[Proposal] = []
        step = self.executor.max_batch or len(drafting)
        for start in range(0, len(drafting), step):
            part = slice(start, start + step)
            rows = [stream.slot for stream in drafting[part]]
            found = self.executor.draft_from(self._contexts, chosen[part], heat[part], draws[part], rows)
            draft = first_slots(found, width)
            assert draft.candidate_ids is not None and draft.q is not None
            parts.append(Proposal(draft.tokens, draft.candidate_ids, draft.q))
            if len(drafting) > step:  # the executor's next call may overwrite these
                parts[-1] = Proposal(*(tensor.clone() for tensor in parts[-1]))
        return _spread(parts, index, len(streams))

    def append(self, streams: Sequence[Stream], hidden: Tensor, counts: Tensor) -> None:
        """Appends the first counts[n] of hidden [N, T, A*d] to the contexts of the streams that draft."""
        chosen = [n for n, stream in enumerate(streams) if stream.draft_tokens]
        step = self.executor.max_batch or len(chosen)
        for start in range(0, len(chosen), step or 1):
            part = chosen[start : start + step]
            states, taken = hidden, counts
            if len(part) < len(streams):
                index = torch.tensor(part)
                states, taken = states[to_device(index, states.device)], taken[to_device(index, taken.device)]
            self.executor.append_context(self._contexts, states, taken, [streams[n].slot for n in part])

    def advance(self, streams: Sequence[Stream], counts: Sequence[int]) -> None:
        """The host's record of what was appended."""
        for stream, count in zip(streams, counts, strict=True):
            if stream.draft_tokens:
                self.lengths[stream.slot] += count
        chosen = [stream for stream in streams if stream.draft_tokens]
        if chosen:
            most = [self.lengths[stream.slot] + stream.unread * self.block_size for stream in chosen]
            self.executor.at_most(self._contexts, most, [stream.slot for stream in chosen])

    def truncate(self, streams: Sequence[Stream], lengths: Sequence[int]) -> None:
        """Forgets what lies behind the first lengths[n] tokens."""
        chosen = [n for n, stream in enumerate(streams) if stream.draft_tokens]
        if chosen:
            slots = [streams[n].slot for n in chosen]
            self.executor.truncate(self._contexts, torch.tensor([lengths[n] for n in chosen]), slots)
            for n, slot in zip(chosen, slots, strict=True):
                self.lengths[slot] = lengths[n]

    def reset(self, slot: int, clean: Tensor | None) -> None:
        """Empties a slot; overwrites it first with `clean` [1, 1, A*d], where values that are not finite may lie in it."""
        length, self.lengths[slot] = self.lengths[slot], 0
        self.executor.reset(self._contexts, [slot])
        if clean is not None:
            # Two blocks may have been appended that the host does not count.
            length = min(length + 2 * self.block_size, self._room)
            nothing = clean.expand(1, length, clean.shape[2])
            self.executor.append_context(self._contexts, nothing, torch.tensor([length]), [slot])
            self.executor.reset(self._contexts, [slot])

    def _rules(self, streams: Sequence[Stream]) -> tuple[Tensor, Tensor]:
        """Temperatures float32 [N] and uniform numbers float32 [N, B-1] to draft with."""
        if all(stream.temperature == 0 for stream in streams):
            return self._greedy[0][: len(streams)], self._greedy[1][: len(streams)]
        slots = self.block_size - 1
        rows = [np.concatenate(([stream.temperature], stream.next_uniforms()[:slots])) for stream in streams]
        table = to_device(torch.from_numpy(np.stack(rows).astype(np.float32)), self._device)
        return table[:, 0].contiguous(), table[:, 1:].contiguous()


def _spread(parts: list[Proposal], index: Tensor | None, rows: int) -> Proposal:
    """Joins parts and puts row n of them at index[n] of `rows`; the other rows are zero."""
    columns = []
    for tensors in zip(*parts, strict=True):
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if index is not None:
            whole = whole.new_zeros(rows, *whole.shape[1:]).index_copy(0, index, whole)
        columns.append(whole)
    return Proposal(*columns)
