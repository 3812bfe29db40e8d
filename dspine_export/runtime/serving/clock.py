"""Model time, rounds, and everything else apart.

Model time is what the target and the drafter take. On the CPU it is the time of their calls. On CUDA calls only enqueue work, so it is
measured on the device, between events recorded around each call: launches that the device waits for belong to it, host work done while
the device is busy costs nothing and does not appear.

A round's time is measured on the same scale, from the end of the round queued before it to its own: every moment between the two in
which the models do not run, be it for other kernels or because the device had nothing to do, is the serving layer's. A round that follows
something else (a prompt, a rest) has no such time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

Section = Literal["prefill", "draft", "target", "append"]
SECTIONS: tuple[Section, ...] = get_args(Section)
_Mark = Any  # an event on the device, or seconds


@dataclass(frozen=True)
class RoundTime:
    """One round over `sequences`: seconds from the end of the round before, and those of them in the models."""

    sequences: int
    seconds: float
    model_seconds: float


@dataclass
class _Round:
    sequences: int
    first: _Mark | None
    sections: list[tuple[_Mark, _Mark]] = field(default_factory=list)
    last: _Mark | None = None


class ModelClock:
    """Seconds per section since the last `take`, and the rounds that have ended since the last `take_rounds`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[Section, _Mark, _Mark]] = deque()
        self._rounds: deque[_Round] = deque()
        self._open: _Round | None = None
        self._before: _Mark | None = None  # the end of the round before
        self._waited = 0.0

    @property
    def runs_inside(self) -> bool:
        """Whether the models run inside their calls, in the host's own time."""
        return not self._cuda

    @contextmanager
    def section(self, name: Section) -> Iterator[None]:
        """Counts what the model does inside as `name`; outside of a round it parts the rounds before and after."""
        first = self._mark()
        yield
        last = self._mark()
        self._pending.append((name, first, last))
        if self._open is not None:
            self._open.sections.append((first, last))
        else:
            self._before = None

    @contextmanager
    def round(self, sequences: int) -> Iterator[None]:
        """Takes the sections inside as one round."""
        current = self._open = _Round(sequences, self._before)
        self._before = None
        try:
            yield
            self._before = current.last = self._mark()
            self._rounds.append(current)
        finally:
            self._open = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The host waits for the device."""
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    def take_waited(self) -> float:
        """Seconds the host has waited since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def rest(self) -> None:
        """Nothing follows the last round for a while."""
        self._before = None

    def take(self) -> dict[Section, float]:
        """Seconds of the sections that have ended on the device since the last call; the others appear in a later one."""
        seconds: dict[Section, float] = dict.fromkeys(SECTIONS, 0.0)
        while self._pending and self._reached(self._pending[0][2]):
            name, first, last = self._pending.popleft()
            seconds[name] += self._between(first, last)
        return seconds

    def take_rounds(self) -> list[RoundTime]:
        """The rounds that directly followed another and have ended since the last call."""
        ended: list[RoundTime] = []
        while self._rounds and self._reached(self._rounds[0].last):
            done = self._rounds.popleft()
            if done.first is not None:
                inside = sum(self._between(*section) for section in done.sections)
                ended.append(RoundTime(done.sequences, self._between(done.first, done.last), inside))
        return ended

    def _mark(self) -> _Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _reached(self, mark: _Mark) -> bool:
        return not self._cuda or bool(mark.query())

    def _between(self, first: _Mark, last: _Mark) -> float:
        return float(first.elapsed_time(last) / 1000 if self._cuda else last - first)
