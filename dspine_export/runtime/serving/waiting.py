"""Streams that wait for a slot, first come, first served."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from dspine_export.runtime.serving.outcomes import OverloadedError
from dspine_export.runtime.serving.stream import Stream


class WaitingStreams:
    """A queue of at most `most` streams; any thread may use it."""

    def __init__(self, most: int) -> None:
        self._most, self._streams = most, deque[Stream]()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._streams)

    def put(self, stream: Stream) -> None:
        """Raises OverloadedError when the queue is full."""
        with self._lock:
            if len(self._streams) >= self._most:
                got, fix = f"{len(self._streams)} requests waiting", "try again later, or serve with a larger max_queue"
                raise OverloadedError("The server is overloaded", got=got, expected=f"below {self._most}", fix=fix)
            self._streams.append(stream)

    def take(self) -> Stream | None:
        """The next one, None where nobody waits."""
        with self._lock:
            return self._streams.popleft() if self._streams else None

    def drop(self, unwanted: Callable[[Stream], bool]) -> list[Stream]:
        """Takes out those that are not wanted any more."""
        with self._lock:
            dropped = [stream for stream in self._streams if unwanted(stream)]
            if dropped:
                self._streams = deque(stream for stream in self._streams if stream not in dropped)
        return dropped
