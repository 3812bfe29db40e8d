"""Memory of a server's process tree, sampled in the background."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

PERIOD_S = 5.0


def tree_bytes(process: psutil.Process) -> dict[str, int]:
    """Anonymous bytes (RSS without file and shared-memory pages), summed over the server's own processes and over its Python stubs.

    What a process has to itself (USS) would jump whenever another server maps or drops the same libraries.
    """
    found = {"server": 0, "stubs": 0}
    for member in [process, *process.children(recursive=True)]:
        try:
            memory = member.memory_info()
            found["stubs" if "stub" in member.name() else "server"] += memory.rss - memory.shared
        except psutil.Error:
            continue
    return found


@dataclass
class MemoryTrace:
    """Samples of [seconds since the start, server bytes, stub bytes], taken until `stop`."""

    pid: int
    period_s: float = PERIOD_S
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._process = psutil.Process(self.pid)
        self._done = threading.Event()
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples."""
        self._done.set()
        self._thread.join()

    def summary(self) -> dict[str, Any]:
        """The trace, and by how much the second half's largest and smallest values leave its mean."""
        late = [server + stubs for _, server, stubs in self.samples[len(self.samples) // 2 :]]
        mean = sum(late) / len(late) if late else 0.0
        return {
            "samples_mb": [[round(at), round(s / 1e6, 1), round(p / 1e6, 1)] for at, s, p in self.samples],
            "second_half_mean_mb": round(mean / 1e6, 1),
            "second_half_spread": round(max(abs(value - mean) for value in late) / mean, 5) if late else None,
        }

    def _run(self) -> None:
        while True:
            found = tree_bytes(self._process)
            self.samples.append((time.monotonic() - self._started, found["server"], found["stubs"]))
            if self._done.wait(self.period_s):
                return
