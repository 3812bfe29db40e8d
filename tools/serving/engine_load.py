"""Closed-loop load on a serving engine in this process: always `level` requests under way, samples as a server's clients would take them.

The engine calls back from its own thread, which only notes the time; everything else happens in the caller's.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

from dspine_export.errors import DspineError
from dspine_export.runtime.serving.engine import Engine
from dspine_export.runtime.serving.handle import Event, Failed, Finished
from dspine_export.runtime.serving.request import Completion, Request
from tools.serving.clients import Sample

_Arrived = tuple[Sample, Event, float]


def run_load(
    engine: Engine, requests: Sequence[Request], level: int, more: Callable[[int], bool]
) -> tuple[list[Sample], float]:
    """Sends requests[n % len] while ``more(n)`` holds, each when another has ended; returns samples and wall seconds."""
    arrived: queue.SimpleQueue[_Arrived] = queue.SimpleQueue()
    samples: list[Sample] = []
    number = running = 0
    started = time.perf_counter()
    while True:
        while running < level and more(number):
            sample = Sample(number % len(requests))
            samples.append(sample)
            running += _submit(engine, requests[sample.prompt], sample, arrived)
            number += 1
        if not running:
            return samples, time.perf_counter() - started
        running -= _take(*arrived.get())


def _submit(engine: Engine, request: Request, sample: Sample, arrived: queue.SimpleQueue[_Arrived]) -> bool:
    try:
        engine.submit(request, lambda event: arrived.put((sample, event, time.perf_counter())))
    except DspineError as error:
        sample.error = str(error)
        sample.ended = time.perf_counter()
        return False
    return True


def _take(sample: Sample, event: Event, when: float) -> bool:
    """Notes an event; whether it was the last one."""
    if isinstance(event, Failed):
        sample.error, sample.ended = str(event.error), when
        return True
    if event.token_ids:
        sample.arrivals.append((when, len(event.token_ids)))
    sample.tokens += event.token_ids
    sample.text += event.text
    if isinstance(event, Finished):
        sample.final, sample.ended = _final(event.completion), when
        return True
    return False


def _final(done: Completion) -> dict[str, Any]:
    """The last response's figures under the names a server gives them."""
    statistics = done.statistics
    return {
        "finish_reason": done.finish_reason,
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": len(done.token_ids),
        "acceptance_rate": statistics.acceptance_rate,
        "acceptance_length": statistics.acceptance_length,
        "total_accepted_draft_tokens": statistics.accepted_tokens,
        "total_draft_tokens": statistics.draft_tokens,
        "accepted_per_position": statistics.accepted_per_position,
        "queue_seconds": done.queue_seconds,
        "time_to_first_token": done.first_token_seconds,
    }
