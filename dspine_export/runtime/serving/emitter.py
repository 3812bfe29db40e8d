"""Text and events, in a thread of their own: while the device computes a round, this one says what the round before has brought.

The loop decides which tokens are committed; here they become text, are counted, and reach the caller. Everything that ends a request
passes through here, so each gets its events in order and exactly one last one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspine_export.errors import DspineError
from dspine_export.runtime.generation import FinishReason
from dspine_export.runtime.serving.counters import Counters
from dspine_export.runtime.serving.handle import Event, Failed
from dspine_export.runtime.serving.outcomes import inside_engine, outcome_of
from dspine_export.runtime.serving.stream import Stream

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Committed:
    """Tokens that a pass has committed to a stream.

    Attributes:
        finish_reason: set with the stream's last tokens.
        checked: drafted and accepted tokens of the round, None for the prompt's pass.
    """

    stream: Stream
    tokens: list[int]
    finish_reason: FinishReason | None
    checked: tuple[int, int] | None = None
    near_ties: int = 0


@dataclass(frozen=True)
class Ended:
    """A stream that ends with an error, unless it has ended already."""

    stream: Stream
    error: DspineError


class Emitter:
    """Takes `Committed` and `Ended` in order. A stream whose text ends it is marked `stopped`, for the loop to see.

    Args:
        counters: the current ones, asked for every time.
    """

    def __init__(self, counters: Callable[[], Counters]) -> None:
        self._counters = counters
        self._jobs: queue.SimpleQueue[Sequence[Committed | Ended] | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dspine-emitter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, jobs: Sequence[Committed | Ended]) -> None:
        """Hands over what a turn has brought; from the loop's thread."""
        self._jobs.put(jobs)

    def flush(self) -> None:
        """Waits until everything handed over before has been said."""
        if self._thread.is_alive():
            done = threading.Event()
            self._jobs.put(done)
            done.wait()

    def close(self) -> None:
        """Says the rest and ends the thread."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (jobs := self._jobs.get()) is not None:
            if isinstance(jobs, threading.Event):
                jobs.set()
                continue
            for job in jobs:
                if not job.stream.stopped:
                    self._say(job)

    def _say(self, job: Committed | Ended) -> None:
        if isinstance(job, Ended):
            self._end(job.stream, job.error)
            return
        stream = job.stream
        try:
            count, event = stream.event(job.tokens, job.finish_reason, job.checked, job.near_ties)
        except Exception as error:  # whatever goes wrong with a text is this stream's alone
            LOG.exception("text of a stream failed")
            self._end(stream, inside_engine(error))
            return
        counters = self._counters()
        if job.checked is None:
            counters.first_token(len(stream.prompt))
        else:
            counters.sequence_round(job.checked[0], min(job.checked[1], count), count, job.near_ties)
        if stream.stopped:  # counted before the caller hears of it
            counters.request("ok")
        if event is not None:
            _send(stream, event)

    def _end(self, stream: Stream, error: DspineError) -> None:
        stream.stopped = True
        self._counters().request(outcome_of(error))
        _send(stream, Failed(error))


def _send(stream: Stream, event: Event) -> None:
    try:
        stream.handle.send(event)
    except Exception:
        LOG.exception("an event could not be delivered")
