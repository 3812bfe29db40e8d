"""Continuous batching: who waits, who has a slot, and what one turn of the loop does.

A turn drops what was cancelled or has expired, gives free slots to those who wait, runs at most one budget of prompt tokens, and one
draft-verify round for every stream that has its first token. Streams join before any turn and leave after it.

Where the models compute ahead, the round is queued before the round of the turn before is read: the device goes on to it while the host
takes, counts and says what that one has brought. Streams that turn out to have ended are in one round too many, whose tokens are dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch

from dspine_export.errors import DspineError
from dspine_export.runtime.serving.counters import Counters
from dspine_export.runtime.serving.emitter import Committed, Emitter, Ended
from dspine_export.runtime.serving.judge import choose
from dspine_export.runtime.serving.outcomes import CancelledError, DeadlineError, inside_engine, not_finite
from dspine_export.runtime.serving.slot_models import Checked, QueuedRound, SlotModels
from dspine_export.runtime.serving.stream import Stream
from dspine_export.runtime.serving.waiting import WaitingStreams

LOG = logging.getLogger(__name__)


class BrokenError(Exception):
    """The models can no longer be run at all."""


class Scheduler:
    """Slots and queue. `enqueue` may be called from any thread, everything else belongs to the loop's.

    Args:
        max_queue: streams that may wait. chunk_tokens: the budget of prompt tokens of one turn, padding included.
        ahead: queue rounds ahead where the models compute ahead.
    """

    def __init__(
        self, models: SlotModels, slots: int, *, max_queue: int, chunk_tokens: int, ahead: bool = True
    ) -> None:
        self.models, self.counters = models, Counters()
        self.emitter = Emitter(lambda: self.counters)
        self.slots, self._chunk_tokens, self._ahead = slots, chunk_tokens, ahead
        self._free = list(range(slots))
        self._running: list[Stream] = []
        self._waiting = WaitingStreams(max_queue)
        self._unsaid: list[Committed | Ended] = []
        self._queued: deque[QueuedRound] = deque()  # oldest first

    @property
    def queue_depth(self) -> int:
        return len(self._waiting)

    @property
    def slots_in_use(self) -> int:
        return self.slots - len(self._free)

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    @property
    def _goes_ahead(self) -> bool:
        return self._ahead and self.models.computes_ahead

    def enqueue(self, stream: Stream) -> None:
        """Raises OverloadedError when the queue is full."""
        self._waiting.put(stream)

    def turn(self) -> None:
        """One turn of the loop. Raises BrokenError when the models fail even a request that cannot be at fault."""
        started, clock = time.perf_counter(), self.models.clock
        self._drop_given_up()
        self._admit()
        turn = self._turn_ahead if self._goes_ahead or self._queued else self._turn_in_step
        prompts, batch = turn()
        if not self._queued:
            self._say()  # no round follows that would
        seconds, model, waited = time.perf_counter() - started, clock.take(), clock.take_waited()
        if self.idle or not (batch or self._queued):
            clock.rest()
        self.counters.loop(seconds, model, clock.take_rounds())
        if batch:
            host = seconds - waited - (sum(model.values()) if clock.runs_inside else 0.0)
            self.counters.turn(batch, host, waited=waited > 0, prompts=prompts)

    def _turn_in_step(self) -> tuple[bool, int]:
        """Prompts, then a round; whether there were prompts, and the streams of the round."""
        prompts = self._prefill()
        batch = _by_slot(stream for stream in self._running if not stream.remaining_prompt)
        if batch:
            self._isolated(batch, self._round_part)
        return prompts, len(batch)

    def _turn_ahead(self) -> tuple[bool, int]:
        """A round is queued, then prompts, then the round before is read; returns as above, with the streams of the round read."""
        batch = self._next_round()
        size = len(self._queued[0].streams) if self._queued else 0
        if self._queued and not (self._goes_ahead and self.models.foresees(batch)):
            self._read()
            batch = self._next_round()
        if batch and self._goes_ahead:
            self._queue(batch)
        self._say()
        prompts = self._prefill()
        while len(self._queued) > bool(batch):
            self._read()
        if self._queued and all(stream.slot < 0 for stream in self._queued[-1].streams):  # nobody is left to read it
            self._queued.clear()
        return prompts, size

    def _next_round(self) -> list[Stream]:
        """Streams that go on whatever the rounds bring that were queued."""
        return _by_slot(s for s in self._running if not s.remaining_prompt and s.sequence.remaining > s.unread)

    def _queue(self, streams: Sequence[Stream]) -> None:
        """Queues a round. When that raises, these streams go on one by one, from what the rounds before have brought."""
        try:
            self._queued.append(self.models.queue(streams))
        except Exception:
            LOG.exception("queueing a round of %d failed", len(streams))
            while self._queued:
                self._read()
            self._one_by_one(streams, self._round_part)

    def _read(self) -> None:
        """Takes the oldest round queued. When the device failed, what was queued behind it is void as well."""
        try:
            rows = self._queued[0].read()
        except Exception:
            LOG.exception("a queued round failed")
            streams = {stream: None for queued in self._queued for stream in queued.streams}
            self._queued.clear()
            self._one_by_one(list(streams), self._round_part)
            return
        self._take(self._queued.popleft().streams, rows)
        self._sweep()

    def fail_all(self, error: DspineError) -> None:
        """Ends every stream, waiting or running, with `error`."""
        for stream in (*self._running, *self._waiting.drop(lambda _: True)):
            with suppress(Exception):  # broken models cannot be told to forget a slot
                self._fail(stream, error)
        self._running = []
        self._queued.clear()
        self._say()

    def _say(self) -> None:
        """Hands over what passes have brought: while the device computes the next one, where it can be so."""
        if self._unsaid:
            said, self._unsaid = self._unsaid, []
            self.emitter.put(said)

    def _drop_given_up(self) -> None:
        now = time.monotonic()
        dropped = self._waiting.drop(lambda stream: _given_up(stream, now))
        for stream in self._running:
            if stream.stopped:  # by its text
                self._release(stream)
            elif _given_up(stream, now):
                dropped.append(stream)
        for stream in dropped:
            if stream.handle.cancelled:
                self._fail(stream, CancelledError("The request was cancelled"))
            else:
                seconds = f"{now - stream.submitted_at:.3f} s, {len(stream.sequence.tokens)} tokens"
                self._fail(stream, DeadlineError("The request's deadline has passed", got=seconds))
        self._sweep()

    def _admit(self) -> None:
        while self._free:
            stream = self._waiting.take()
            if stream is None:
                return
            stream.slot = min(self._free)  # low slots first: running ones stay neighbours
            self._free.remove(stream.slot)
            stream.admitted_at = time.monotonic()
            self._running.append(stream)

    def _prefill(self) -> bool:
        """Runs one budget of prompt tokens, oldest streams first."""
        counts: dict[Stream, int] = {}
        for stream in self._running:
            if not stream.remaining_prompt:
                continue
            count = min(stream.remaining_prompt, self._chunk_tokens)
            if counts and max(*counts.values(), count) * (len(counts) + 1) > self._chunk_tokens:
                break
            counts[stream] = count
        if counts:
            self._isolated(_by_slot(counts), lambda part: self._prefill_part(part, [counts[s] for s in part]))
        return bool(counts)

    def _prefill_part(self, streams: Sequence[Stream], counts: Sequence[int]) -> None:
        logits = self.models.prefill(streams, counts)
        if logits is None:
            return
        complete = [stream for stream in streams if not stream.remaining_prompt]
        chosen = [
            choose(row, stream.temperature, stream.top_p, stream.draws.first() if stream.temperature else 0.0)
            for stream, row in zip(complete, logits, strict=True)
        ]
        firsts = torch.stack([torch.stack(pair) for pair in chosen]).tolist()
        for stream, (token, finite) in zip(complete, firsts, strict=True):
            if finite:
                self._emit(stream, stream.commit([token]))
            else:
                self._fail(stream, not_finite(), erase=True)

    def _round_part(self, streams: Sequence[Stream]) -> None:
        self._take(streams, self.models.round(streams))

    def _take(self, streams: Sequence[Stream], rows: Sequence[Checked]) -> None:
        """What a round has brought to those of its streams that still run."""
        pairs = [(stream, row) for stream, row in zip(streams, rows, strict=True) if stream.slot >= 0]
        streams, rows = [stream for stream, _ in pairs], [row for _, row in pairs]
        kept: list[list[int]] = []
        for stream, row in pairs:
            kept.append(stream.commit(row.tokens) if row.finite else [])
            if not row.finite:
                self._fail(stream, not_finite(), erase=True)
        try:
            self.models.commit(streams, rows)
        except Exception as error:  # their tokens are taken, so there is no second attempt
            LOG.exception("committing a round of %d failed", len(streams))
            for stream in streams:
                self._blame(stream, error)
        for stream, row, tokens in zip(streams, rows, kept, strict=True):
            if stream.slot >= 0:
                self._emit(stream, tokens, (row.width, row.accepted), row.near_ties)

    def _emit(
        self, stream: Stream, tokens: list[int], checked: tuple[int, int] | None = None, near_ties: int = 0
    ) -> None:
        """Tokens just committed; a slot is free before its last token is said."""
        if stream.finished:
            self._release(stream)
        self._unsaid.append(Committed(stream, tokens, stream.sequence.finish_reason, checked, near_ties))

    def _isolated(self, streams: Sequence[Stream], run: Callable[[Sequence[Stream]], None]) -> None:
        """Runs a batch; when it raises, one by one, so that only the streams at fault are lost."""
        try:
            run(streams)
        except Exception as error:
            LOG.exception("a batch of %d failed", len(streams))
            if len(streams) == 1:
                self._blame(streams[0], error)
            else:
                self._one_by_one(streams, run)
        self._sweep()

    def _one_by_one(self, streams: Sequence[Stream], run: Callable[[Sequence[Stream]], None]) -> None:
        """For each of those that still run, from where the host knows them to be."""
        self.models.restore([stream for stream in streams if stream.slot >= 0])
        for stream in streams:
            if stream.slot >= 0:
                self._isolated([stream], run)

    def _blame(self, stream: Stream, error: Exception) -> None:
        """Ends a stream whose pass raised, and finds out whether the models still work."""
        if stream.slot < 0:
            return
        slot = stream.slot
        self._fail(stream, inside_engine(error), erase=True)
        try:
            self.models.probe(slot)
        except Exception as failure:
            raise BrokenError(f"{type(failure).__name__}: {failure}"[:400]) from error

    def _fail(self, stream: Stream, error: DspineError, *, erase: bool = False) -> None:
        try:
            self._release(stream, erase=erase)
        finally:
            self._unsaid.append(Ended(stream, error))

    def _release(self, stream: Stream, *, erase: bool = False) -> None:
        if stream.slot < 0:
            return
        slot, stream.slot = stream.slot, -1
        self._free.append(slot)
        self.models.reset(slot, erase=erase)

    def _sweep(self) -> None:
        self._running = [stream for stream in self._running if stream.slot >= 0]


def _by_slot(streams: Iterable[Stream]) -> list[Stream]:
    """Neighbouring slots beside each other: the caches read those in place."""
    return sorted(streams, key=lambda stream: stream.slot)


def _given_up(stream: Stream, now: float) -> bool:
    return stream.handle.cancelled or (stream.expires_at is not None and now >= stream.expires_at)
