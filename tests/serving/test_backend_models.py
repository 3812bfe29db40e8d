"""The two models as Triton drives them, with a stand-in for its module; the real server is in tests/triton."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dspine_export.runtime.generate import generate_plain
from dspine_export.triton.backend.model import TritonPythonModel
from tests.runtime.conftest import Opened
from tests.runtime.pairs import Pair
from tests.serving import fake_triton
from tests.serving.fake_triton import Request

Load = Callable[..., TritonPythonModel]
PROCESS = "dspine_0_0"


@pytest.fixture
def load(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Loads a model as the server does; parameters as keywords."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_triton)
    models: list[TritonPythonModel] = []

    def start(decoupled: bool = True, max_batch_size: int = 0, **parameters: str) -> TritonPythonModel:
        fake_triton.MetricFamily.known.clear()
        given = {
            "bundle": str(tiny_pair.drafter),
            "target_model": str(tiny_pair.target),
            "max_slots": "2",
            "max_seq_len": "100",
            "threads": "1",
            "warmup": "false",
        } | parameters
        config = {
            "max_batch_size": max_batch_size,
            "model_transaction_policy": {"decoupled": decoupled},
            "parameters": {name: {"string_value": value} for name, value in given.items()},
        }
        model = TritonPythonModel()
        models.append(model)
        place = {"model_repository": "models/dspine", "model_name": "dspine", "model_version": "1"}
        place["model_instance_name"] = PROCESS
        model.initialize({"model_config": json.dumps(config)} | place)
        return model

    yield start
    for model in models:
        model.finalize()


def text_of(request: Request) -> str:
    return b"".join(response.outputs["text_output"].reshape(-1)[0] for response in request.wait()).decode()


def test_streamed_and_whole_answers(load: Load, tiny: Opened, tokenizer: Any) -> None:
    model = load()
    ask = {"text_input": "hello", "max_tokens": np.array([12], dtype=np.int32)}
    whole, stream = Request(**ask), Request(**ask, stream=True)
    assert model.execute([whole, stream]) is None
    want = generate_plain(tiny[0], tokenizer("hello")["input_ids"], max_new_tokens=12).token_ids
    assert len(whole.wait()) == 1 and len(stream.wait()) > 1
    assert whole.responses[0].outputs["output_ids"].tolist() == want
    assert np.concatenate([r.outputs["output_ids"] for r in stream.responses]).tolist() == want
    assert text_of(stream) == text_of(whole)
    final = stream.responses[-1].outputs
    assert final["finish_reason"].tolist() in ([b"length"], [b"stop"]) and final["prompt_tokens"].tolist() == [5]
    assert all("finish_reason" not in response.outputs for response in stream.responses[:-1])


def test_a_batch_dimension(load: Load) -> None:
    model = load(max_batch_size=1)
    request = Request(text_input=np.array([[b"hello"]], dtype=np.object_), max_tokens=np.array([[3]]))
    model.execute([request])
    outputs = request.wait()[0].outputs
    assert outputs["text_output"].shape == (1, 1) and outputs["output_ids"].shape == (1, 3)


def test_mistakes_and_the_others_go_on(load: Load) -> None:
    model = load()
    wrong = [
        Request(text_input=b"\xff"),
        Request(text_input="a", max_tokens=-1),
        Request(),
        Request(text_input="a" * 1000),
        Request(text_input="a", num_draft_tokens=99),
        Request("no json", text_input="a"),
    ]
    good = Request(text_input="a", max_tokens=2)
    model.execute([*wrong[:3], good, *wrong[3:]])
    assert good.wait()[0].error is None
    for request in wrong:
        (response,) = request.wait()
        assert response.error is not None and not response.outputs
        assert response.error.code == ("internal" if request is wrong[-1] else "invalid")
    wait_for(lambda: metric("dspine_requests_total", "invalid") == 5)


def metric(name: str, *own: str) -> float:
    return fake_triton.MetricFamily.known[name].series[("dspine", "1", *own)].value


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_client_that_goes_away(load: Load, decoupled: bool) -> None:
    model = load(decoupled, max_slots="1")
    gone = Request(text_input="a", max_tokens=90, ignore_eos=True)
    gone.cancelled = True
    responses = model.execute([gone]) or gone.wait()
    assert responses[0].error.code == "cancelled"
    after = Request(text_input="a", max_tokens=2)
    responses = model.execute([after]) or after.wait()
    assert responses[0].error is None
    assert model._model.engine.slots_in_use == 0


def test_a_model_that_is_not_decoupled(load: Load) -> None:
    model = load(False, max_batch_size=4)
    requests = [Request(text_input=f"{n}", max_tokens=3) for n in range(4)]
    responses = model.execute([*requests, Request(text_input="a", stream=True), Request(max_tokens=1)])
    assert responses is not None
    assert [r.outputs["completion_tokens"].tolist() for r in responses[:4]] == [[[3]]] * 4
    assert "does not stream" in responses[4].error.message and "exactly one prompt" in responses[5].error.message


def test_metrics_are_exported(load: Load) -> None:
    model = load()
    assert metric("dspine_slots", PROCESS) == 2 and metric("dspine_healthy", PROCESS) == 1
    request = Request(text_input="hello", max_tokens=9, ignore_eos=True)
    model.execute([request])
    request.wait()
    wait_for(lambda: metric("dspine_requests_total", "ok") == 1)
    wait_for(lambda: metric("dspine_accepted_length_sum") == 8)
    assert metric("dspine_accepted_length_bucket", "+Inf") == metric("dspine_sequence_rounds_total")
    assert metric("dspine_generated_tokens_total") == 9


def test_deadline_and_overload(load: Load) -> None:
    model = load(max_slots="1", max_queue="1", default_deadline_ms="60000")
    late = Request('{"deadline_ms": 1}', text_input="a", max_tokens=90, ignore_eos=True)
    model.execute([late])
    assert "deadline" in late.wait()[0].error.message
    crowd = [Request(text_input="a", max_tokens=60, ignore_eos=True) for _ in range(12)]
    model.execute(crowd)
    errors = [response.error for request in crowd for response in request.wait()]
    refused = [error for error in errors if error is not None]
    assert 0 < len(refused) < 12
    assert all(error.code == "unavailable" and "overloaded" in error.message for error in refused)


def test_what_cannot_be_served_fails_the_load(load: Load) -> None:
    with pytest.raises(fake_triton.TritonModelException, match=r"Invalid parameter\n.*max_slots"):
        load(max_slots="none")
    with pytest.raises(fake_triton.TritonModelException, match="does not exist"):
        load(bundle="gone")
    with pytest.raises(fake_triton.TritonModelException, match="longer than the target"):
        load(max_seq_len="100000")


def test_the_drafter_model(load: Load) -> None:
    model = load(kind="drafter", idle_seconds="5")
    control = {"CORRID": np.array([4], dtype=np.uint64), "END": False}
    hidden = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    first = Request(target_hidden=hidden, anchor_id=np.array([7]), START=True, **control)
    unknown = Request(anchor_id=np.array([7]), CORRID=np.array([5], dtype=np.uint64), START=False, END=False)
    responses = model.execute([first, unknown])
    assert responses is not None
    assert responses[0].outputs["draft_tokens"].shape == (3,)
    assert responses[0].outputs["context_length"].tolist() == [3]
    assert responses[1].error.code == "invalid" and "Unknown sequence" in responses[1].error.message
