"""Target and drafter over the same slots: pieces of prompts and draft-verify rounds for any subset of them.

Nothing here decides what to run; nothing is committed before the caller says so. Symbols: N rows of a pass, T tokens, B block, V
vocabulary rows, A taps, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspine_export.runtime.batch_buckets import batch_bucket
from dspine_export.runtime.captured_verify import FEWEST_COLUMNS
from dspine_export.runtime.device_copy import to_device, to_host
from dspine_export.runtime.executor import DrafterExecutor
from dspine_export.runtime.proposal import first_slots
from dspine_export.runtime.serving.clock import ModelClock
from dspine_export.runtime.serving.judge import Rules, judge
from dspine_export.runtime.serving.stream import Stream, probe_stream
from dspine_export.runtime.target import TargetExecutor

PROMPT_STEP = 64  # tokens that pieces of prompts are padded to where shapes should be few


@dataclass(frozen=True)
class Checked:
    """One row of a round, on the host: its drafts, how many were checked and kept, the token after them."""

    drafts: list[int]
    width: int
    accepted: int
    following: int
    finite: bool
    near_ties: int

    @property
    def tokens(self) -> list[int]:
        """What the round commits."""
        return [*self.drafts[: self.accepted], self.following]


class _Proposal(NamedTuple):
    """tokens int64 [N, T-1], candidate_ids int64 and q float32 [N, T-1, K]."""

    tokens: Tensor
    candidate_ids: Tensor
    q: Tensor


class SlotModels:
    """The two models and their caches.

    Args:
        executor: None serves the target alone.
        slots: sequences at once. max_seq_len: tokens of prompt and output together.
        count_near_ties: see `judge`.
    """

    def __init__(
        self,
        target: TargetExecutor,
        executor: DrafterExecutor | None,
        *,
        slots: int,
        max_seq_len: int,
        count_near_ties: bool = False,
    ) -> None:
        self.target, self.executor, self.clock = target, executor, ModelClock(target.device)
        self.block_size = 1 if executor is None else executor.config.block_size
        self._count_near_ties = count_near_ties
        self._greedy = tuple(
            torch.zeros(shape, device=target.device) for shape in ((slots,), (slots, self.block_size - 1))
        )
        # A GPU library's first call with new sizes costs more than a whole pass; on a CPU padding is computed in vain.
        self.few_shapes = target.device.type == "cuda"
        self._cache = target.new_slots(slots, max_seq_len + self.block_size)
        self._contexts, self._room = None, max_seq_len + self.block_size
        self._context_lengths = [0] * slots
        if executor is not None:
            if executor.max_context is not None:
                self._room = min(self._room, executor.max_context)
            self._contexts = executor.new_slots(slots, self._room)

    @property
    def computes_ahead(self) -> bool:
        """Whether a round's passes are queued in no time, so that host work is free between that and their end."""
        return self.target.captured

    def capture(self) -> None:
        """Where the target's passes are captured: captures them, for every batch size and length, with drafts and without."""
        sizes = sorted({min(batch_bucket(n), self._cache.slots) for n in range(1, self._cache.slots + 1)})
        columns = FEWEST_COLUMNS
        while self.target.captured:
            for size, tokens in product(sizes, {1, self.block_size}):
                rows, length = list(range(size)), min(columns, self._cache.capacity) - 1 - (1 << tokens.bit_length())
                self._cache.advance(rows, [max(length, 0)] * size)
                ids = torch.zeros(size, tokens, dtype=torch.int64, device=self.target.device)
                self.target.verify(self._cache.view(rows), ids)
                for row in rows:
                    self._cache.reset(row)
            if columns >= self._cache.capacity:
                return
            columns *= 2

    def drafts_for(self, prompt_tokens: int) -> int:
        """Most tokens that can be drafted behind a prompt of this length."""
        limit = None if self.executor is None else self.executor.max_context
        return 0 if limit is not None and prompt_tokens + self.block_size > limit else self.block_size - 1

    def reset(self, slot: int, *, erase: bool = False) -> None:
        """Empties a slot of both caches; `erase` when it may hold values that are not finite."""
        self._cache.reset(slot, erase=erase)
        length, self._context_lengths[slot] = self._context_lengths[slot], 0
        if self.executor is None:
            return
        self.executor.reset(self._contexts, [slot])
        if erase:
            width = self.executor.config.num_taps * self.executor.config.hidden_size
            # A block may have been appended that the host does not count.
            length = min(length + self.block_size, self._room)
            nothing = self.target.embed_tokens.new_zeros(1, length, width)
            self.executor.append_context(self._contexts, nothing, torch.tensor([length]), [slot])
            self.executor.reset(self._contexts, [slot])

    def restore(self, streams: Sequence[Stream]) -> None:
        """After a pass that raised: the drafter's contexts of these streams hold what the target's cache holds, and no more."""
        chosen = [stream.slot for stream in streams if stream.draft_tokens]
        if self.executor is not None and chosen:
            lengths = [self._cache.lengths[slot] for slot in chosen]
            self.executor.truncate(self._contexts, torch.tensor(lengths), chosen)
            for slot, length in zip(chosen, lengths, strict=True):
                self._context_lengths[slot] = length

    def probe(self, slot: int) -> None:
        """Runs a prompt and a round in an empty slot; raises whatever the models raise."""
        stream = probe_stream(slot, self.block_size)
        self.prefill([stream], [1])
        stream.anchor = 0
        self.commit([stream], self.round([stream]))
        self.reset(slot)

    def prefill(self, streams: Sequence[Stream], counts: Sequence[int]) -> Tensor | None:
        """Runs the next counts[n] prompt tokens of every stream and commits them.

        Returns float32 [M, V], the logits after the M prompts that are complete now, in the streams' order; None where M = 0.
        """
        rows, longest = [stream.slot for stream in streams], max(counts)
        if self.few_shapes:
            longest = -(-longest // PROMPT_STEP) * PROMPT_STEP
        ids = np.zeros((len(streams), longest), dtype=np.int64)
        for row, (stream, count) in enumerate(zip(streams, counts, strict=True)):
            ids[row, :count] = stream.prompt[stream.prefilled : stream.prefilled + count]
        ends = [n for n, stream in enumerate(streams) if stream.remaining_prompt == counts[n]]
        with self.clock.section("prefill"):
            normed, hidden = self.target.states(
                self._cache.view(rows), to_device(torch.from_numpy(ids), self.target.device)
            )
            last = to_device(torch.tensor([counts[n] - 1 for n in ends], dtype=torch.int64), normed.device)
            logits = self.target.logits(normed[to_device(torch.tensor(ends), normed.device), last]) if ends else None
            self._append(streams, hidden, torch.tensor(counts))
        self._advance(streams, counts)
        for stream, count in zip(streams, counts, strict=True):
            stream.prefilled += count
        return logits

    def round(self, streams: Sequence[Stream], meanwhile: Callable[[], None] = lambda: None) -> list[Checked]:
        """Drafts for every stream that wants it and checks all of them in one pass of the target.

        The drafter's context takes what the target keeps at once, on the device; the host's record waits for `commit`.
        `meanwhile` is called when all is queued, before the wait for the device.
        """
        device = self.target.device
        widths = [self._width(stream) for stream in streams]
        table = np.array([[stream.anchor for stream in streams], widths], dtype=np.int64)
        anchors, checked = to_device(torch.from_numpy(table), device)
        drafting = [n for n, width in enumerate(widths) if width]
        draft = None
        if drafting:
            with self.clock.section("draft"):
                width = self.block_size - 1 if self.few_shapes else max(widths)
                draft = self._draft([streams[n] for n in drafting], anchors, drafting, width)
        drafts = draft.tokens if draft is not None else anchors.new_zeros(len(streams), 0)
        with self.clock.section("target"):
            view = self._cache.view([stream.slot for stream in streams])
            step = self.target.verify(view, torch.cat((anchors[:, None], drafts), dim=1))
        verdicts = judge(
            step.logits,
            drafts,
            None if draft is None else draft.candidate_ids,
            None if draft is None else draft.q,
            self._rules(streams, checked, drafts.shape[1]),
            count_near_ties=self._count_near_ties,
        )
        columns = (verdicts.accepted, verdicts.following, verdicts.finite, verdicts.near_ties)
        arriving = to_host(torch.cat((torch.stack(columns, dim=1), drafts), dim=1))
        with self.clock.section("append"):  # of every row: those that end here lose their slots, and it with them
            self._append(streams, step.hidden, verdicts.accepted + 1)
        meanwhile()
        on_host = arriving().tolist()  # the round's only wait for the device
        return [
            Checked(drafts, width, accepted, following, bool(finite), ties)
            for width, (accepted, following, finite, ties, *drafts) in zip(widths, on_host, strict=True)
        ]

    def commit(self, streams: Sequence[Stream], rows: Sequence[Checked]) -> None:
        """Commits a round for the streams in it that go on: their anchors and accepted drafts."""
        going = [n for n, stream in enumerate(streams) if not stream.finished and stream.slot >= 0]
        self._advance([streams[n] for n in going], [rows[n].accepted + 1 for n in going])

    def _advance(self, streams: Sequence[Stream], counts: Sequence[int]) -> None:
        """The host's record of what both caches hold."""
        self._cache.advance([stream.slot for stream in streams], counts)
        for stream, count in zip(streams, counts, strict=True):
            if stream.draft_tokens:
                self._context_lengths[stream.slot] += count

    def _append(self, streams: Sequence[Stream], hidden: Tensor, counts: Tensor) -> None:
        """Appends the first counts[n] of hidden [N, T, A*d] to the drafter's context of the streams that draft."""
        chosen = [n for n, stream in enumerate(streams) if stream.draft_tokens]
        if self.executor is None or not chosen:
            return
        step = self.executor.max_batch or len(chosen)
        for start in range(0, len(chosen), step):
            part = chosen[start : start + step]
            states, taken = hidden, counts
            if len(part) < len(streams):
                index = torch.tensor(part)
                states, taken = states[to_device(index, states.device)], taken[to_device(index, taken.device)]
            self.executor.append_context(self._contexts, states, taken, [streams[n].slot for n in part])

    def _width(self, stream: Stream) -> int:
        """Tokens to draft for a stream in this round."""
        executor = self.executor
        if executor is None or not stream.draft_tokens:
            return 0
        limit = executor.max_context
        if limit is not None and self._context_lengths[stream.slot] + self.block_size > limit:
            stream.draft_tokens = 0  # for good: its context is no longer kept up to date
            return 0
        if stream.anchor >= executor.config.vocab_size:  # a padded head has rows the drafter does not know
            return 0
        return min(stream.draft_tokens, stream.sequence.remaining - 1)

    def _draft(self, streams: Sequence[Stream], anchors: Tensor, where: list[int], width: int) -> _Proposal:
        """Blocks of `width` tokens for all rows of the pass; only rows `where`, those of `streams`, hold drafts."""
        executor, every = self.executor, anchors.shape[0]
        assert executor is not None
        index = None if len(where) == every else to_device(torch.tensor(where), anchors.device)
        chosen = anchors if index is None else anchors[index]
        heat, draws = self._draft_rules(streams)
        parts: list[_Proposal] = []
        step = executor.max_batch or len(streams)
        for start in range(0, len(streams), step):
            part = slice(start, start + step)
            rows = [stream.slot for stream in streams[part]]
            draft = first_slots(executor.draft_from(self._contexts, chosen[part], heat[part], draws[part], rows), width)
            assert draft.candidate_ids is not None and draft.q is not None
            parts.append(_Proposal(draft.tokens, draft.candidate_ids, draft.q))
            if len(streams) > step:  # the executor's next call may overwrite these
                parts[-1] = _Proposal(*(tensor.clone() for tensor in parts[-1]))
        return _spread(parts, index, every)

    def _draft_rules(self, streams: Sequence[Stream]) -> tuple[Tensor, Tensor]:
        """Temperatures float32 [N] and uniform numbers float32 [N, B-1] to draft with."""
        slots, device = self.block_size - 1, self.target.device
        if all(stream.temperature == 0 for stream in streams):
            return self._greedy[0][: len(streams)], self._greedy[1][: len(streams)]
        rows = [np.concatenate(([stream.temperature], stream.begin_round()[:slots])) for stream in streams]
        table = to_device(torch.from_numpy(np.stack(rows).astype(np.float32)), device)
        return table[:, 0].contiguous(), table[:, 1:].contiguous()

    def _rules(self, streams: Sequence[Stream], widths: Tensor, drafted: int) -> Rules:
        sampled = [n for n, stream in enumerate(streams) if stream.temperature > 0]
        if not sampled:
            return Rules(widths)
        slots = self.block_size - 1
        draws = np.stack([streams[n].begin_round() for n in sampled])
        heat = np.array([(streams[n].temperature, streams[n].top_p) for n in sampled], dtype=np.float32)
        table = to_device(torch.from_numpy(np.concatenate((heat, draws), axis=1)), widths.device)
        nucleus = table[:, 1] if any(streams[n].top_p < 1 for n in sampled) else None
        accept = table[:, 2 + slots : 2 + slots + drafted]
        rows = to_device(torch.tensor(sampled), widths.device)
        return Rules(widths, rows, table[:, 0], nucleus, accept, table[:, -1].contiguous())


def _spread(parts: list[_Proposal], index: Tensor | None, rows: int) -> _Proposal:
    """Joins parts and puts row n of them at index[n] of `rows`; the other rows are zero."""
    columns = []
    for tensors in zip(*parts, strict=True):
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        if index is not None:
            whole = whole.new_zeros(rows, *whole.shape[1:]).index_copy(0, index, whole)
        columns.append(whole)
    return _Proposal(*columns)
