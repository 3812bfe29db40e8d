"""Requests, parameters and configurations of the Triton backend, without Triton."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine_export.errors import UsageError
from dspine_export.runtime.serving.request import Completion
from dspine_export.runtime.statistics import AcceptanceStatistics
from dspine_export.triton.backend.complete import complete
from dspine_export.triton.backend.metrics import METRICS, MetricsExporter, series_of
from dspine_export.triton.backend.parameters import engine_settings, pair_source, read_parameters
from dspine_export.triton.backend.text_inputs import TextRequest, parse_request
from dspine_export.triton.backend.text_outputs import final_arrays, piece_arrays
from dspine_export.triton.contract import TEXT_INPUTS, TEXT_OUTPUTS, drafter_inputs, drafter_outputs


def parse(parameters: str = "", timeout_us: int = 0, **inputs: Any) -> TextRequest:
    arrays = {name: value if isinstance(value, np.ndarray) else np.array([value]) for name, value in inputs.items()}
    for name, array in arrays.items():
        if array.dtype.kind in "US":
            arrays[name] = np.array([str(v).encode() for v in array], dtype=np.object_)
    return parse_request(arrays.get, parameters, timeout_us, 1000)


def test_every_input_of_the_contract_is_read() -> None:
    asked: set[str] = set()
    given = {"text_input": np.array([b"a"], dtype=np.object_)}

    def read(name: str) -> Any:
        asked.add(name)
        return given.get(name)

    parsed = parse_request(read, "", 0, 1000)
    assert asked == {tensor.name for tensor in TEXT_INPUTS}
    request = parsed.request
    assert (request.text, request.temperature, request.top_p, request.seed) == ("a", 0.0, 1.0, 0)
    assert request.max_tokens is None and request.deadline_seconds is None and not parsed.stream


def test_values_and_shapes() -> None:
    """With and without a batch dimension, as TensorRT-LLM's clients and curl send them."""
    parsed = parse(
        '{"deadline_ms": "1500"}',
        text_input=np.array([["héllo".encode()]], dtype=np.object_),
        max_tokens=np.array([[7]], dtype=np.int32),
        stop_words=np.array([[b"x", "é".encode()]], dtype=np.object_),
        stream=np.array([True]),
        temperature=np.array([0.5], dtype=np.float32),
        random_seed=np.array([2**64 - 1], dtype=np.uint64),
        num_draft_tokens=np.array([0], dtype=np.int32),
        top_p=np.array([0.25], dtype=np.float32),
    )
    request = parsed.request
    assert request.text == "héllo" and request.max_tokens == 7 and request.stop_words == ("x", "é")
    assert request.temperature == 0.5 and request.top_p == 0.25 and request.seed == 2**64 - 1
    assert request.num_draft_tokens == 0 and request.deadline_seconds == 1.5 and parsed.stream


def test_the_sooner_deadline_counts() -> None:
    assert parse('{"deadline_ms": 300}', 200_000, text_input="a").request.deadline_seconds == 0.2
    assert parse('{"deadline_ms": 100}', 200_000, text_input="a").request.deadline_seconds == 0.1
    assert parse("{}", 250_000, text_input="a").request.deadline_seconds == 0.25
    assert parse('{"timeout": 50000, "deadline_ms": 100}', text_input="a").request.deadline_seconds == 0.05
    assert parse('{"timeout": 0}', text_input="a").request.deadline_seconds is None


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("seed", "did you mean 'random_seed'"),
        ("stop", "did you mean 'stop_words'"),
        ("max_tokns", "did you mean 'max_tokens'"),
        ("deadline", "did you mean 'deadline_ms'"),
        ("temperature", "send it as an input"),
        ("frequency_penalty", "num_draft_tokens"),
    ],
)
def test_parameters_that_nobody_reads_are_refused(name: str, fix: str) -> None:
    """At /generate they are misspelt inputs, which the server does not report."""
    with pytest.raises(UsageError, match=f"Nothing reads(.|\n)*{name}(.|\n)*{fix}"):
        parse(json.dumps({name: 1}), text_input="a")


def test_parameters_of_the_server_are_its_own() -> None:
    given = {"priority": 1, "sequence_id": 3, "sequence_start": True, "triton_enable_empty_final_response": True}
    assert parse(json.dumps(given), text_input="a").request.text == "a"
    prompt = {"text_input": np.array([b"a"], dtype=np.object_)}
    assert parse_request(prompt.get, '{"traceparent": "00-1"}', 0, 1000, strict=False).request.text == "a"


CHAT = json.dumps([{"role": "user", "content": "hi"}])


def test_messages() -> None:
    assert parse(messages=CHAT).request.messages == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({}, "exactly one prompt"),
        ({"text_input": "a", "input_ids": np.array([1])}, "exactly one prompt"),
        ({"text_input": np.array([b"\xff\xfe"], dtype=np.object_)}, r"UTF-8\n.*text_input\n.*0xff at 0"),
        ({"text_input": np.array([3])}, "wrong type"),
        ({"text_input": np.array([b"a", b"b"], dtype=np.object_)}, r"wrong shape\n.*text_input\n.*\[2\]"),
        ({"text_input": "a", "max_tokens": np.zeros((0,), dtype=np.int32)}, "wrong shape"),
        ({"text_input": "a", "max_tokens": -1}, "max_tokens"),
        ({"text_input": "a", "temperature": np.array([np.nan], dtype=np.float32)}, "temperature"),
        ({"text_input": "a", "top_p": np.array([1.5], dtype=np.float32)}, "top_p"),
        ({"text_input": "a", "num_draft_tokens": -2}, "num_draft_tokens"),
        ({"text_input": "a", "stop_words": np.array([b"\xc3"], dtype=np.object_)}, "stop_words"),
        ({"text_input": "a", "stop_words": np.array([b""], dtype=np.object_)}, "stop_words"),
        ({"input_ids": np.array([1.5])}, "integers"),
        ({"messages": "[" * 900}, "messages"),
        ({"messages": "x" * 1001}, "too long"),
        ({"messages": "{}"}, "Not a chat"),
        ({"messages": '[{"role": "user"}]'}, "Not a chat"),
        ({"messages": '[{"role": "user", "content": 3}]'}, "Not a chat"),
        ({"text_input": "a", "parameters": '{"deadline_ms": "soon"}'}, "deadline_ms"),
        ({"text_input": "a", "parameters": '{"deadline_ms": -5}'}, "deadline_ms"),
        ({"text_input": "a", "parameters": '{"timeout": "soon"}'}, "timeout"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_requests(inputs: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        parse(**inputs)


@pytest.mark.parametrize("batched", [False, True])
def test_outputs_are_those_of_the_contract(batched: bool) -> None:
    statistics = AcceptanceStatistics()
    statistics.record(3, 2, 3)
    done = Completion("text", [1, 2, 3, 4], "stop", 5, statistics, queue_seconds=0.5, first_token_seconds=0.75)
    arrays = final_arrays("xt", [3, 4], done, batched=batched)
    types = {"TYPE_STRING": np.object_, "TYPE_INT32": np.int32, "TYPE_FP32": np.float32}
    assert set(arrays) == {tensor.name for tensor in TEXT_OUTPUTS}
    for tensor in TEXT_OUTPUTS:
        array = arrays[tensor.name][0] if batched else arrays[tensor.name]
        assert array.dtype == types[tensor.dtype] and array.ndim == 1
        assert tensor.dims == (-1,) or array.shape == tensor.dims
    flat = {name: array.reshape(-1).tolist() for name, array in arrays.items()}
    assert flat["text_output"] == [b"xt"] and flat["total_draft_tokens"] == [3] and flat["completion_tokens"] == [4]
    assert flat["acceptance_length"] == [3.0] and flat["accepted_per_position"] == [1, 1, 0]
    assert set(piece_arrays("é", [], batched=batched)) == {tensor.name for tensor in TEXT_OUTPUTS if tensor.streamed}


def config_of(**parameters: str) -> dict[str, Any]:
    return {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}


def test_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bundle", "elsewhere", "target", "models/dspine"):
        (tmp_path / name).mkdir(parents=True)
    paths = {"bundle": "../bundle", "target_model": "../target"}
    model = tmp_path / "models" / "dspine"
    parameters = read_parameters(config_of(**paths, max_slots="3", default_deadline_ms="1500"), model)
    settings = engine_settings(parameters)
    assert settings.slots == 3 and settings.max_queue == 256 and settings.threads is None
    assert settings.limits.default_deadline_seconds == 1.5 and settings.limits.max_prompt_bytes == 1 << 18
    pair = pair_source(parameters)
    assert pair.source == tmp_path / "bundle" and pair.check_hashes and pair.resolved_dtype == "float32"
    monkeypatch.setenv("DSPINE_BUNDLE", str(tmp_path / "elsewhere"))
    assert pair_source(parameters).source == tmp_path / "elsewhere"
    assert pair_source(read_parameters(config_of(target_model="../target"), model)).source == tmp_path / "elsewhere"


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"max_slots": "0"}, "max_slots"),
        ({"max_slots": "many"}, "max_slots"),
        ({"warmup": "maybe"}, "true or false"),
        ({"drain_seconds": "-1"}, "drain_seconds"),
        ({"bundle": "../nowhere"}, "does not exist"),
        ({"max_slotz": "4"}, "one of bundle"),
        ({"kind": "other"}, "text or drafter"),
        ({"bundle": None}, "missing"),
    ],
    ids=str,
)
def test_parameters_that_are_wrong(tmp_path: Path, parameters: dict[str, str | None], match: str) -> None:
    given = {"bundle": ".", "target_model": "."} | parameters
    with pytest.raises(UsageError, match=match):
        read = read_parameters(config_of(**{k: v for k, v in given.items() if v is not None}), tmp_path / "dspine")
        engine_settings(read)
        pair_source(read)
        read.boolean("warmup")
        read.number("drain_seconds")


class FakeConfig:
    """Triton's `ModelConfig`."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = {"max_batch_size": 0, "input": [], "output": [], "parameters": {}} | document

    def as_dict(self) -> dict[str, Any]:
        return self.document

    def add_input(self, tensor: dict[str, Any]) -> None:
        self.document["input"].append(tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        self.document["output"].append(tensor)

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        self.document["model_transaction_policy"] = policy


def test_completion_of_a_bare_configuration() -> None:
    document = complete(FakeConfig({})).as_dict()
    assert [tensor["name"] for tensor in document["input"]] == [tensor.name for tensor in TEXT_INPUTS]
    assert [tensor["name"] for tensor in document["output"]] == [tensor.name for tensor in TEXT_OUTPUTS]
    assert document["model_transaction_policy"] == {"decoupled": True}
    whole = complete(FakeConfig(document)).as_dict()
    assert len(whole["input"]) == len(TEXT_INPUTS)
    kept = complete(FakeConfig({"model_transaction_policy": {"decoupled": False}})).as_dict()
    assert kept["model_transaction_policy"] == {"decoupled": False}


def test_completion_of_a_drafter() -> None:
    document = complete(FakeConfig(config_of(kind="drafter"))).as_dict()
    assert [tensor["name"] for tensor in document["input"]] == [tensor.name for tensor in drafter_inputs(8)]
    assert [tensor["name"] for tensor in document["output"]] == [tensor.name for tensor in drafter_outputs(8, 4)]
    assert document["sequence_batching"]["oldest"] == {} and "model_transaction_policy" not in document


SNAPSHOT: dict[str, Any] = {
    "requests": {"ok": 2, "invalid": 1},
    "prompt_tokens": 9,
    "generated_tokens": 12,
    "rounds": 4,
    "sequence_rounds": 6,
    "drafted_tokens": 18,
    "accepted_tokens": 7,
    "accepted_lengths": [0, 3, 1, 0, 2],
    "model_seconds": {"target": 1.5},
    "serving_seconds": 0.25,
    "queue_depth": 0,
    "slots_in_use": 1,
    "slots": 4,
    "healthy": True,
}


class FakeFamily:
    """Triton's MetricFamily; all values in one table."""

    COUNTER, GAUGE = "counter", "gauge"
    values: dict[tuple[str, str], float]
    calls = 0

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert description and kind in ("counter", "gauge")
        self.name = name

    def Metric(self, labels: dict[str, str]) -> Any:
        key = self.name, json.dumps(labels, sort_keys=True)
        family = type(self)

        class One:
            def increment(self, by: float) -> None:
                family.calls += 1
                family.values[key] = family.values.get(key, 0) + by

            def set(self, value: float) -> None:
                family.calls += 1
                family.values[key] = value

        return One()


def test_metrics_follow_the_counters() -> None:
    series = series_of(SNAPSHOT, 4)
    assert {name for name, _ in series} == {metric.name for metric in METRICS}
    assert [series["dspine_accepted_length_bucket", le] for le in ("1", "2", "3", "4", "+Inf")] == [3, 4, 4, 6, 6]
    assert series["dspine_accepted_length_sum", ""] == 3 + 2 + 8
    FakeFamily.values = {}
    exporter = MetricsExporter(type("pb_utils", (), {"MetricFamily": FakeFamily}), "dspine", "1", "dspine_0_1", 4)
    exporter.update(SNAPSHOT)
    exporter.update(SNAPSHOT | {"rounds": 10, "slots_in_use": 0})
    before = FakeFamily.calls
    exporter.update(SNAPSHOT | {"rounds": 10, "slots_in_use": 0})
    assert FakeFamily.calls == before, "no message without a change"
    labels = {"model": "dspine", "version": "1"}
    assert FakeFamily.values["dspine_rounds_total", json.dumps(labels, sort_keys=True)] == 10
    gauge = json.dumps(labels | {"process": "dspine_0_1"}, sort_keys=True)
    assert FakeFamily.values["dspine_slots_in_use", gauge] == 0, "instances do not overwrite each other's"
    assert FakeFamily.values["dspine_requests_total", json.dumps(labels | {"outcome": "ok"}, sort_keys=True)] == 2
