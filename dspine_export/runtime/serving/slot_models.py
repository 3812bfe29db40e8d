"""Target and drafter over the same slots: pieces of prompts and draft-verify rounds for any subset of them.

Nothing here decides what to run; nothing is committed before the caller says so. Symbols: N rows of a pass, T tokens, B block, V
vocabulary rows, A taps, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dspine_export.runtime.batch_buckets import batch_bucket
from dspine_export.runtime.captured_verify import FEWEST_COLUMNS, MOST_PROMPT_ROWS, MOST_PROMPT_TOKENS, MOST_TOKENS
from dspine_export.runtime.device_copy import Arriving, to_device
from dspine_export.runtime.executor import DrafterExecutor
from dspine_export.runtime.serving.clock import ModelClock
from dspine_export.runtime.serving.judge import Rules, judge
from dspine_export.runtime.serving.slot_drafter import Proposal, SlotDrafter
from dspine_export.runtime.serving.slot_state import Known, SlotState
from dspine_export.runtime.serving.stream import Stream, probe_stream
from dspine_export.runtime.target import TargetExecutor

PROMPT_STEP = 64  # tokens that pieces of prompts are padded to where shapes should be few


class Checked(NamedTuple):
    """One row of a round, on the host: its drafts, how many were checked and kept, the token after them."""

    drafts: list[int]
    width: int
    accepted: int
    following: int
    finite: int
    near_ties: int

    @property
    def tokens(self) -> list[int]:
        """What the round commits."""
        return [*self.drafts[: self.accepted], self.following]


class QueuedRound:
    """A round that the device works on, or has done."""

    def __init__(self, streams: Sequence[Stream], arriving: Arriving, clock: ModelClock) -> None:
        self.streams, self._arriving, self._clock = streams, arriving, clock
        for stream in streams:
            stream.unread += 1

    def read(self) -> list[Checked]:
        """Waits for its results, one row per stream; once, and in the order of queueing."""
        if not self._arriving.here:
            with self._clock.waiting():
                self._arriving.wait()
        found = self._arriving.wait().tolist()
        for stream in self.streams:
            stream.unread -= 1
        return [
            Checked(drafts, width, accepted, following, finite, ties)
            for accepted, following, finite, ties, width, *drafts in found
        ]


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
        # A GPU library's first call with new sizes costs more than a whole pass; on a CPU padding is computed in vain.
        self.few_shapes = target.device.type == "cuda"
        room = max_seq_len + 2 * self.block_size  # a sequence that has ended unseen runs on for a round
        self._cache, self._state = target.new_slots(slots, room), SlotState(slots, target.device)
        self._drafter = None if executor is None else SlotDrafter(executor, slots, room, target.device)
        self._padded_head = executor is not None and executor.config.vocab_size < target.embed_tokens.shape[0]

    @property
    def computes_ahead(self) -> bool:
        """Whether a round is queued in much less time than it takes, so that the next one is best queued before it is read."""
        return self.target.captured

    def capture(self, prompt_tokens: int) -> None:
        """Where the target's passes are captured: captures them, for every batch size and length, with drafts and without, and for
        pieces of prompts of up to `prompt_tokens` in all.
        """
        sizes = sorted({min(batch_bucket(n), self._cache.slots) for n in range(1, self._cache.slots + 1)})
        blocks = list(product(sizes, sorted({1, self.block_size})))
        prompts = []
        width = PROMPT_STEP
        while width < 2 * prompt_tokens and width <= MOST_PROMPT_TOKENS:
            # A budget of pieces longer than half the width, before they are padded to it.
            most = batch_bucket(max(1, prompt_tokens // (width // 2 + 1 if width > PROMPT_STEP else 1)))
            prompts += [(size, width) for size in sizes if size <= most and size * width <= MOST_PROMPT_ROWS]
            width *= 2
        columns = FEWEST_COLUMNS
        while self.target.captured:
            last = min(columns, self._cache.capacity)
            for size, tokens in blocks + prompts:
                self._run_once(size, tokens, last - (1 << (tokens - 1).bit_length()))
            if columns >= self._cache.capacity:
                return
            columns *= 2

    def _run_once(self, size: int, tokens: int, length: int) -> None:
        """A pass over `size` empty slots as if each held `length` tokens."""
        if length < 0:
            return
        rows, ids = list(range(size)), torch.zeros(size, tokens, dtype=torch.int64, device=self.target.device)
        self._cache.advance(rows, [length] * size)
        (self.target.verify if tokens <= MOST_TOKENS else self.target.read)(self._cache.view(rows), ids)
        for row in rows:
            self._cache.reset(row)

    def drafts_for(self, prompt_tokens: int) -> int:
        """Most tokens that can be drafted behind a prompt of this length."""
        return 0 if self._drafter is None else self._drafter.drafts_for(prompt_tokens)

    def foresees(self, streams: Sequence[Stream]) -> bool:
        """Whether one more round of these streams can be queued before those that were queued are read."""
        return self._drafter is None or self._drafter.foresees(streams)

    def reset(self, slot: int, *, erase: bool = False) -> None:
        """Empties a slot of both caches; `erase` when it may hold values that are not finite."""
        self._cache.reset(slot, erase=erase)
        self._state.forget(slot)
        if self._drafter is not None:
            config = self._drafter.executor.config
            width = config.num_taps * config.hidden_size
            self._drafter.reset(slot, self.target.embed_tokens.new_zeros(1, 1, width) if erase else None)

    def restore(self, streams: Sequence[Stream]) -> None:
        """After a pass that raised: rounds not read are void, the device holds of these streams what the host knows and no more."""
        for stream in streams:
            stream.unread = 0
            self._state.forget(stream.slot)
        if self._drafter is not None:
            self._drafter.truncate(streams, [self._cache.lengths[stream.slot] for stream in streams])

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
            view, device = self._cache.view(rows), self.target.device
            normed, hidden = self.target.read(view, to_device(torch.from_numpy(ids), device))
            last = to_device(torch.tensor([counts[n] - 1 for n in ends], dtype=torch.int64), normed.device)
            logits = self.target.logits(normed[to_device(torch.tensor(ends), normed.device), last]) if ends else None
            if self._drafter is not None:
                self._drafter.append(streams, hidden, torch.tensor(counts))
        self._advance(streams, counts)
        for stream, count in zip(streams, counts, strict=True):
            stream.prefilled += count
        return logits

    def round(self, streams: Sequence[Stream]) -> list[Checked]:
        """Queues a round and waits for it."""
        return self.queue(streams).read()

    def queue(self, streams: Sequence[Stream]) -> QueuedRound:
        """Drafts for every stream that wants it and checks all of them in one pass of the target.

        Rounds of these streams may be unread: anchors and lengths are the device's. There everything is taken on at once; the host's
        record waits for `commit`.
        """
        drafter = self._drafter
        most = [0 if drafter is None else drafter.most(stream) for stream in streams]
        longest = max(self._cache.lengths[s.slot] + s.unread * self.block_size for s in streams)
        with self.clock.round(len(streams)):
            known = self._state.read(streams, most, self._cache.lengths)
            widths, draft = self._propose(streams, known, most)
            drafts = known.anchors.new_zeros(len(streams), 0) if draft is None else draft.tokens
            with self.clock.section("target"):
                view = self._cache.queued_view([s.slot for s in streams], known.index, known.lengths, longest)
                step = self.target.verify(view, torch.cat((known.anchors[:, None], drafts), dim=1))
            rules = self._rules(streams, widths, drafts.shape[1])
            ids, q = (None, None) if draft is None else (draft.candidate_ids, draft.q)
            found = judge(step.logits, drafts, ids, q, rules, count_near_ties=self._count_near_ties)
            columns = (found.accepted, found.following, found.finite, found.near_ties, widths)
            arriving = Arriving(torch.cat((torch.stack(columns, dim=1), drafts), dim=1))
            taken = found.accepted + 1
            self._state.advance(known, found.following, taken)
            if drafter is not None:
                with self.clock.section(
                    "append"
                ):  # of every row: those that end here lose their slots, and it with them
                    drafter.append(streams, step.hidden, taken)
        return QueuedRound(streams, arriving, self.clock)

    def _propose(self, streams: Sequence[Stream], known: Known, most: Sequence[int]) -> tuple[Tensor, Proposal | None]:
        """Drafted tokens to check, int64 [N], and the drafts, None where no stream wants any."""
        widths, anchors = torch.minimum(known.most, known.remaining).clamp_min_(0), known.anchors
        drafting = [n for n, tokens in enumerate(most) if tokens]
        if self._drafter is None or not drafting:
            return widths, None
        if self._padded_head:  # rows the drafter does not know
            ids = self._drafter.executor.config.vocab_size
            widths, anchors = widths * (anchors < ids), anchors.clamp_max(ids - 1)
        with self.clock.section("draft"):
            width = self.block_size - 1 if self.few_shapes else max(most)
            return widths, self._drafter.draft(streams, anchors, drafting, width)

    def commit(self, streams: Sequence[Stream], rows: Sequence[Checked]) -> None:
        """Commits a round for the streams in it that go on: their anchors and accepted drafts."""
        going = [n for n, stream in enumerate(streams) if not stream.finished and stream.slot >= 0]
        self._advance([streams[n] for n in going], [rows[n].accepted + 1 for n in going])

    def _advance(self, streams: Sequence[Stream], counts: Sequence[int]) -> None:
        """The host's record of what both caches hold."""
        self._cache.advance([stream.slot for stream in streams], counts)
        if self._drafter is not None:
            self._drafter.advance(streams, counts)

    def _rules(self, streams: Sequence[Stream], widths: Tensor, drafted: int) -> Rules:
        sampled = [n for n, stream in enumerate(streams) if stream.temperature > 0]
        if not sampled:
            return Rules(widths)
        slots = self.block_size - 1
        draws = np.stack([streams[n].next_uniforms() for n in sampled])
        heat = np.array([(streams[n].temperature, streams[n].top_p) for n in sampled], dtype=np.float32)
        table = to_device(torch.from_numpy(np.concatenate((heat, draws), axis=1)), widths.device)
        nucleus = table[:, 1] if any(streams[n].top_p < 1 for n in sampled) else None
        accept = table[:, 2 + slots : 2 + slots + drafted]
        rows = to_device(torch.tensor(sampled), widths.device)
        return Rules(widths, rows, table[:, 0], nucleus, accept, table[:, -1].contiguous())
