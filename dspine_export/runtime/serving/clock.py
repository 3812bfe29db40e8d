"""Model time and everything else, apart.

Model time is what the target and the drafter take. On the CPU it is the time of their calls. On CUDA calls only enqueue work, so it is
measured on the device, between events recorded around each call: launches that the device waits for belong to it, host work done while
the device is busy costs nothing and does not appear.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

Section = Literal["prefill", "draft", "target", "append"]
SECTIONS: tuple[Section, ...] = get_args(Section)


class ModelClock:
    """Seconds per section since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[Section, Any, Any]] = deque()
        self._seconds: dict[Section, float] = dict.fromkeys(SECTIONS, 0.0)

    @contextmanager
    def section(self, name: Section) -> Iterator[None]:
        """Counts what the model does inside as `name`."""
        if self._cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self._pending.append((name, first, last))
            return
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[Section, float]:
        """Seconds of the sections that have ended on the device since the last call; the others appear in a later one."""
        while self._pending and self._pending[0][2].query():
            name, first, last = self._pending.popleft()
            self._seconds[name] += first.elapsed_time(last) / 1000
        taken, self._seconds = self._seconds, dict.fromkeys(SECTIONS, 0.0)
        return taken
