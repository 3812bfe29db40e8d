"""The log of a run: means over windows of steps, kept on the device until a window closes so that no step waits for the GPU."""

from __future__ import annotations

import json
import math
import time

from torch import Tensor

WINDOW = 50  # steps
PRINT_EVERY = 10  # windows


class RunLog:
    """Entries of {"step", "seconds", metric means}; prints some of them as JSON lines."""

    def __init__(self, steps: int) -> None:
        self.entries: list[dict[str, float]] = []
        self._steps, self._started = steps, time.perf_counter()
        self._sums: dict[str, Tensor] = {}
        self._count = 0

    def add(self, step: int, loss: Tensor, metrics: dict[str, Tensor]) -> None:
        """Record step number ``step`` (from 1). Exits when the loss of a window is not finite."""
        for name, value in {"loss": loss.detach(), **metrics}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._count += 1
        if step % WINDOW and step != self._steps:
            return
        entry: dict[str, float] = {"step": step, "seconds": round(time.perf_counter() - self._started, 1)}
        entry |= {name: round(float(value) / self._count, 4) for name, value in self._sums.items()}
        self.entries.append(entry)
        self._sums, self._count = {}, 0
        if not math.isfinite(entry["loss"]):
            raise SystemExit(f"training diverged by step {step}: loss {entry['loss']}")
        if len(self.entries) % PRINT_EVERY == 0 or step == self._steps:
            print(json.dumps(entry), flush=True)
