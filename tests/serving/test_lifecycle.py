"""Queues, slots, deadlines, failures: who is told what, and who goes on."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from dspine_export.errors import UsageError
from dspine_export.runtime.serving.engine import Engine
from dspine_export.runtime.serving.handle import Failed, Handle, Piece
from dspine_export.runtime.serving.outcomes import (
    CancelledError,
    DeadlineError,
    OverloadedError,
    ServingError,
    UnavailableError,
)
from dspine_export.runtime.serving.request import Request
from dspine_export.runtime.serving.slot_models import QueuedRound, SlotModels
from tests.runtime.conftest import Opened
from tests.serving.conftest import MAX_SEQ_LEN, Serve, random_prompt

LONG = {"max_tokens": MAX_SEQ_LEN - 10, "ignore_eos": True}


def wait_for(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Gate:
    """Holds the engine's rounds while closed."""

    def __init__(self, engine: Engine) -> None:
        self._open, self._queue = threading.Event(), engine.models.queue
        engine.models.queue = self  # type: ignore[method-assign, assignment]

    def __call__(self, streams: Any) -> Any:
        assert self._open.wait(60)
        return self._queue(streams)

    def open(self) -> None:
        self._open.set()


@pytest.mark.usefixtures("pace")
def test_cancellation_frees_the_slot(serve: Serve) -> None:
    engine = serve(slots=1)
    gate = Gate(engine)
    running, waiting, third = (engine.submit(Request(token_ids=[n], **LONG)) for n in (1, 2, 3))
    wait_for(lambda: engine.slots_in_use == 1)
    running.cancel()
    waiting.cancel()
    gate.open()
    for handle in (running, waiting):
        with pytest.raises(CancelledError):
            handle.result(30)
    assert len(third.result(60).token_ids) == LONG["max_tokens"]
    counts = engine.snapshot()
    assert counts["requests"]["cancelled"] == 2 and counts["requests"]["ok"] == 1 and counts["slots_in_use"] == 0


@pytest.mark.usefixtures("pace")
def test_deadlines_in_the_queue_and_in_a_slot(serve: Serve) -> None:
    engine = serve(slots=1, limits={"default_deadline_seconds": 0.15})
    gate = Gate(engine)
    running = engine.submit(Request(token_ids=[1], **LONG))
    waiting = engine.submit(Request(token_ids=[2], deadline_seconds=0.1, **LONG))
    patient = engine.submit(Request(token_ids=[3], max_tokens=3, deadline_seconds=60))
    time.sleep(0.2)
    gate.open()
    for handle in (running, waiting):
        with pytest.raises(DeadlineError, match="deadline"):
            handle.result(30)
    assert len(patient.result(30).token_ids) == 3
    assert engine.snapshot()["requests"]["deadline"] == 2


@pytest.mark.usefixtures("pace")
def test_overload_is_said_at_once(serve: Serve) -> None:
    engine = serve(slots=1, max_queue=2)
    gate = Gate(engine)
    first = engine.submit(Request(token_ids=[1], max_tokens=2))
    wait_for(lambda: engine.slots_in_use == 1)
    others = [engine.submit(Request(token_ids=[n], max_tokens=2)) for n in (2, 3)]
    with pytest.raises(OverloadedError, match=r"overloaded\n.*2 requests waiting"):
        engine.submit(Request(token_ids=[4]))
    gate.open()
    for handle in (first, *others):
        assert handle.result(30).token_ids
    assert engine.snapshot()["requests"]["overloaded"] == 1


@pytest.mark.parametrize(
    ("request_fields", "match"),
    [
        ({"token_ids": [1] * MAX_SEQ_LEN}, "prompt is too long"),
        ({"token_ids": []}, "prompt is empty"),
        ({"token_ids": [260]}, "vocabulary"),
        ({"text": "x" * 1001}, "1001 bytes"),
        ({"messages": [{"role": "user", "content": "é" * 600}]}, "1204 bytes"),
        ({"token_ids": [1], "num_draft_tokens": 4}, "block holds 4"),
        ({"token_ids": [1], "stop_words": ["a"] * 17}, "Too many stop words"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
def test_requests_that_do_not_fit(serve: Serve, request_fields: dict[str, Any], match: str) -> None:
    engine = serve(limits={"max_prompt_bytes": 1000})
    with pytest.raises(UsageError, match=match):
        engine.submit(Request(**request_fields))
    assert engine.snapshot()["requests"]["invalid"] == 1
    assert engine.submit(Request(token_ids=[1], max_tokens=2)).result(30)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a", "token_ids": [1]},
        {},
        {"text": "a", "max_tokens": 0},
        {"text": "a", "temperature": -1.0},
        {"text": "a", "temperature": float("nan")},
        {"text": "a", "top_p": 0.0},
        {"text": "a", "seed": -1},
        {"text": "a", "stop_words": [""]},
        {"text": "a", "num_draft_tokens": -1},
        {"text": "a", "deadline_seconds": 0.0},
    ],
    ids=str,
)
def test_requests_that_make_no_sense(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Request(**fields)


def test_a_prompt_that_raises_is_lost_alone(serve: Serve, tiny: Opened) -> None:
    """The target refuses a batch with a certain prompt in it; the others are run without it."""
    engine = serve()
    states = engine.models.target.states
    try:
        engine.models.target.states = lambda view, ids: (  # type: ignore[method-assign]
            _explode() if bool((ids == 99).any()) else states(view, ids)
        )
        gate = Gate(engine)
        gate.open()
        handles = [engine.submit(Request(token_ids=[first], max_tokens=4)) for first in (1, 99, 2)]
        with pytest.raises(ServingError, match="exploded"):
            handles[1].result(30)
        assert [len(handles[n].result(30).token_ids) for n in (0, 2)] == [4, 4]
    finally:
        engine.models.target.states = states  # type: ignore[method-assign]
    assert engine.healthy and engine.snapshot()["requests"]["error"] == 1


def _explode() -> Any:
    raise RuntimeError("exploded")


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("step", ["queue", "read", "commit"])
def test_a_round_that_raises(serve: Serve, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve()
    owner, name = (QueuedRound, "read") if step == "read" else (SlotModels, step)
    original = getattr(owner, name)

    def sometimes(self: Any, *rest: Any) -> Any:
        streams = self.streams if step == "read" else rest[0]
        if any(stream.prompt == [50] and len(stream.sequence.tokens) > 3 for stream in streams):
            _explode()
        return original(self, *rest)

    want = engine.submit(Request(token_ids=[7], max_tokens=12, ignore_eos=True)).result(30).token_ids
    monkeypatch.setattr(owner, name, sometimes)
    handles = [engine.submit(Request(token_ids=[first], max_tokens=12, ignore_eos=True)) for first in (50, 7)]
    with pytest.raises(ServingError, match="exploded"):
        handles[0].result(30)
    if step != "commit":  # nothing was committed, so the others had another attempt
        assert handles[1].result(30).token_ids == want
    assert engine.healthy
    assert engine.submit(Request(token_ids=[7], max_tokens=3)).result(30)


@pytest.mark.usefixtures("pace")
def test_models_that_fail_for_good(serve: Serve) -> None:
    engine = serve()
    engine.models.target.verify, verify = lambda *_: _explode(), engine.models.target.verify  # type: ignore[method-assign]
    try:
        handles = [engine.submit(Request(token_ids=[n], max_tokens=4)) for n in (1, 2)]
        for handle in handles:
            with pytest.raises(ServingError, match="exploded"):
                handle.result(30)
        wait_for(lambda: not engine.healthy)
        with pytest.raises(UnavailableError, match="restart"):
            engine.submit(Request(token_ids=[3]))
        assert "exploded" in str(engine.snapshot()["failure"])
    finally:
        engine.models.target.verify = verify  # type: ignore[method-assign]


@pytest.mark.usefixtures("pace")
def test_values_that_are_not_finite(serve: Serve) -> None:
    """The stream is told, and the slot is clean for the next one."""
    engine = serve(slots=1)
    want = engine.submit(Request(token_ids=[5, 6, 7], max_tokens=8)).result(30).token_ids
    states = engine.models.target.states

    def poisoned(view: Any, ids: Any) -> Any:
        normed, hidden = states(view, ids)
        for cache in (*engine.models._cache.keys, *engine.models._cache.values):
            cache[0, :, : ids.shape[1]] = float("nan")
        return normed * float("nan"), hidden * float("nan")

    engine.models.target.states = poisoned  # type: ignore[method-assign]
    handle = engine.submit(Request(token_ids=[9] * 20, max_tokens=8))
    with pytest.raises(ServingError, match="not finite"):
        handle.result(30)
    engine.models.target.states = states  # type: ignore[method-assign]
    assert engine.submit(Request(token_ids=[5, 6, 7], max_tokens=8)).result(30).token_ids == want


def test_a_sink_that_raises_costs_its_own_events_only(serve: Serve) -> None:
    engine = serve()
    bad = engine.submit(Request(token_ids=[1], max_tokens=5), lambda _event: _explode())
    assert engine.submit(Request(token_ids=[2], max_tokens=5)).result(30)
    assert bad.wait(30) and engine.healthy


@pytest.mark.usefixtures("pace")
def test_text_that_raises_is_this_streams_alone(serve: Serve) -> None:
    engine = serve()
    decode = engine._admission._decoding_tokenizer.decode

    def angry(ids: list[int], **options: Any) -> Any:
        if 77 in ids:
            _explode()
        return decode(ids, **options)

    handles: list[Handle] = [
        engine.submit(Request(token_ids=[3], max_tokens=30, temperature=2.0, seed=n)) for n in range(3)
    ]
    engine._admission._decoding_tokenizer.decode = angry
    for handle in handles:
        handle.wait(30)
    engine._admission._decoding_tokenizer.decode = decode
    assert engine.healthy and engine.slots_in_use == 0


@pytest.mark.usefixtures("pace")
def test_draining(serve: Serve) -> None:
    engine = serve(slots=2)
    handles = [engine.submit(Request(token_ids=[n], max_tokens=20)) for n in range(1, 6)]
    engine.close(drain_seconds=60)
    assert all(handle.result(0.1).token_ids for handle in handles)
    with pytest.raises(UnavailableError, match="not running"):
        engine.submit(Request(token_ids=[1]))


@pytest.mark.usefixtures("pace")
def test_closing_at_once(serve: Serve) -> None:
    engine = serve(slots=1)
    gate = Gate(engine)
    handles = [engine.submit(Request(token_ids=[n], **LONG)) for n in range(1, 4)]
    threading.Timer(0.1, gate.open).start()
    engine.close()
    for handle in handles:
        assert isinstance(list(handle.events(5))[-1], Failed)
    assert not engine.healthy


def test_an_idle_engine_does_not_spin(serve: Serve) -> None:
    engine = serve()
    engine.submit(Request(token_ids=[1], max_tokens=2)).result(30)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1
    assert engine.submit(Request(token_ids=[1], max_tokens=2)).result(30)


@pytest.mark.usefixtures("pace")
def test_figures_add_up(serve: Serve) -> None:
    engine = serve(warm_up=True, slots=3)
    handles = [
        engine.submit(Request(token_ids=[n, n], max_tokens=9, seed=n, temperature=0.5 * (n % 2))) for n in range(1, 9)
    ]
    done = [handle.result(60) for handle in handles]
    engine.close(5)
    counts = engine.snapshot()
    assert counts["requests"]["ok"] == 8 and sum(counts["requests"].values()) == 8
    assert counts["prompt_tokens"] == 16 and counts["generated_tokens"] == sum(len(d.token_ids) for d in done)
    for name, own in (
        ("drafted_tokens", "draft_tokens"),
        ("accepted_tokens",) * 2,
        ("sequence_rounds", "target_calls"),
    ):
        assert counts[name] == sum(getattr(d.statistics, own) for d in done), name
    lengths = counts["accepted_lengths"]
    assert sum(lengths) == counts["sequence_rounds"]
    assert sum(n * count for n, count in enumerate(lengths)) == sum(d.statistics.committed_tokens for d in done)
    assert counts["rounds"] >= counts["sequence_rounds"] / 3
    assert all(seconds > 0 for seconds in counts["model_seconds"].values()) and counts["serving_seconds"] > 0
    for completion in done:
        assert 0 <= completion.queue_seconds <= completion.first_token_seconds <= completion.seconds


@pytest.mark.usefixtures("pace")
def test_clients_that_change_their_minds(serve: Serve) -> None:
    """Cancelled, expired and refused requests among ordinary ones: everything is answered once, and nothing is left behind."""
    engine = serve(slots=3, max_queue=12, chunk_tokens=16)
    rng, handles, refused = random.Random(0), [], 0
    for number in range(40):
        fields = {"deadline_seconds": rng.choice((0.01, 0.1))} if rng.random() < 0.25 else {}
        request = Request(token_ids=random_prompt(number), max_tokens=rng.randrange(1, 30), **fields)
        try:
            handles.append(engine.submit(request))
        except OverloadedError:
            refused += 1
        if handles and rng.random() < 0.3:
            rng.choice(handles).cancel()
        time.sleep(rng.random() * 0.02)
    for handle in handles:
        assert handle.wait(60)
        events = list(handle.events(1))
        assert sum(not isinstance(event, Piece) for event in events) == 1
    engine.close(10)
    counts = engine.snapshot()
    assert sum(counts["requests"].values()) == 40 and counts["requests"]["overloaded"] == refused
    assert counts["requests"]["error"] == counts["requests"]["unavailable"] == 0 and counts["requests"]["ok"] > 0
    assert counts["slots_in_use"] == counts["queue_depth"] == 0
