"""Processes on one device that measure one after another: each waits for its turn, then for that of everybody who waits already.

Engines that are compared start together, which loads the device, and measure alternately, so that none has the cooler or the quieter
hours. A folder is all they share: `wait_for_start` meets at its beginning, `turn` is a queue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

POLL_SECONDS = 0.02
START = "start"


def wait_for_start(folder: Path, name: str) -> None:
    """Says that `name` is ready and returns once the parent has let everybody go (`start_when_ready`)."""
    (folder / f"{name}.ready").touch()
    while not (folder / START).exists():
        time.sleep(POLL_SECONDS)


def start_when_ready(folder: Path, names: list[str]) -> bool:
    """Lets everybody go if all of `names`, those that still run, are ready; returns whether they may go."""
    if names and all((folder / f"{name}.ready").exists() for name in names):
        (folder / START).touch()
    return (folder / START).exists()


@contextmanager
def turn(folder: Path | None) -> Iterator[None]:
    """Entered by one process at a time, in the order in which they asked; a process that died is passed over. None: at once."""
    if folder is None:
        yield
        return
    with FileLock(folder / "queue.lock"):
        taken = [int(path.name.split("-")[0]) for path in _queue(folder)]
        mine = folder / f"{max(taken, default=0) + 1:06d}-{os.getpid()}.turn"
        mine.touch()
    try:
        while _first(folder) != mine:
            time.sleep(POLL_SECONDS)
        yield
    finally:
        mine.unlink()


def _queue(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.turn"))


def _first(folder: Path) -> Path:
    """Whose turn it is; tickets of processes that are gone are removed."""
    for path in _queue(folder):
        try:
            os.kill(int(path.stem.split("-")[1]), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        else:
            return path
    raise RuntimeError(f"{folder}: this process's own turn was taken away")
