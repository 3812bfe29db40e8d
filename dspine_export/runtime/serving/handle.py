"""The caller's end of a request: its events, its result, and the way to give it up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from dspine_export.errors import DspineError
from dspine_export.runtime.serving.outcomes import ServingError
from dspine_export.runtime.serving.request import Completion


@dataclass(frozen=True)
class Piece:
    """Text that has become certain, never empty, and the tokens committed since the piece before."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Finished:
    """The last event of a request that succeeded: the rest of its text and tokens (either may be empty), and the whole."""

    text: str
    token_ids: list[int]
    completion: Completion


@dataclass(frozen=True)
class Failed:
    """The last event of a request that did not succeed."""

    error: DspineError


Event: TypeAlias = Piece | Finished | Failed
Sink: TypeAlias = Callable[[Event], None]


class Handle:
    """One submitted request. Every method may be called from any thread.

    Args:
        wake: called after `cancel`, to make the engine look.
        sink: receives every event in the emitter's thread and must return quickly; without one the events wait in the handle.
    """

    def __init__(self, wake: Callable[[], None], sink: Sink | None = None) -> None:
        self._wake, self._sink = wake, sink
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled, self._done = threading.Event(), threading.Event()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def done(self) -> bool:
        """Whether the last event has been sent."""
        return self._done.is_set()

    def cancel(self) -> None:
        """Gives the request up: its slot is free before the next round, its last event is a `CancelledError`."""
        self._cancelled.set()
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end; False after `timeout` seconds without it."""
        return self._done.wait(timeout)

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Events as they come, the last one included; for handles without a sink, and one reader.

        Raises:
            ServingError: none within `timeout` seconds.
        """
        while True:
            try:
                event = self._events.get(timeout=timeout)
            except queue.Empty:
                raise ServingError("No event within the time given", got=f"{timeout} s") from None
            yield event
            if not isinstance(event, Piece):
                return

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the completion. Raises the request's error, or ServingError after `timeout` seconds without an event."""
        for event in self.events(timeout):
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                return event.completion
        raise AssertionError("events end with Finished or Failed")

    def send(self, event: Event) -> None:
        """For the engine: hands an event over. A sink that raises loses the event and nothing else."""
        try:
            (self._sink or self._events.put)(event)
        finally:
            if not isinstance(event, Piece):
                self._done.set()
