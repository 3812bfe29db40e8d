"""The example pair on a real tritonserver, started by the generated launch.sh: text in, text out, over HTTP and gRPC."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspine_export.runtime.generate import generate_plain
from dspine_export.runtime.load_target import open_target
from dspine_export.runtime.lossless import compare_greedy
from dspine_export.runtime.prompts import encode_prompt, load_tokenizer
from tools.serving.clients import GrpcClient, HttpClient, Sample

from .calls import eventually, generate, metrics, post, value
from .conftest import ROOT, Served
from .server import Server, install_tree, ready, running, wheel_folder

pytestmark = pytest.mark.skipif(wheel_folder() is None, reason="no tritonserver: make test-triton installs one")

MAX_TOKENS, MAX_SEQ_LEN, SLOTS = 10, 384, 16
SUBJECTS = (
    "rivers", "prime numbers", "bread", "the Moon", "sorting a list", "trees", "violins", "rain",
    "photosynthesis", "a red bicycle", "glass", "chess", "the number seven", "maps", "salt", "bees",
)  # fmt: skip
PROMPTS = [f"Write one sentence about {subject}." for subject in SUBJECTS]
LONG = {"text_input": "Count from one to two hundred, in words.", "chat": True, "max_tokens": 300, "ignore_eos": True}


@dataclass(frozen=True)
class Running:
    server: Server
    repository: Path


@pytest.fixture(scope="module")
def running_example(example: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("serving")
    repository = folder / "repository"
    command = [
        sys.executable,
        "-m",
        "dspine_export",
        "triton-repo",
        str(example.bundle),
        "--target-model",
        str(example.target),
    ]
    limits = ["--max-batch-size", str(SLOTS), "--max-seq-len", str(MAX_SEQ_LEN), "--set", "prefill_chunk_tokens=128"]
    subprocess.run([*command, "-o", str(repository), *limits], cwd=ROOT, check=True)
    environment = {"TRITON_HOME": str(install_tree(folder / "triton")), "PYTHON": sys.executable}
    with running([str(repository / "launch.sh")], folder, environment) as server:
        yield Running(server, repository)


@pytest.fixture(scope="module")
def server(running_example: Running) -> Server:
    return running_example.server


@dataclass(frozen=True)
class Reference:
    """The target alone, and what it writes after every prompt."""

    target: Any
    tokenizer: Any
    prompts: list[list[int]]
    outputs: list[list[int]]

    def near_ties(self, which: int, tokens: list[int]) -> int:
        """Compares an output; returns the near-ties in it and fails at any other difference."""
        found = compare_greedy(
            self.target, self.prompts[which], tokens, max_new_tokens=MAX_TOKENS, reference=self.outputs[which]
        )
        found.require_equal(PROMPTS[which])
        return len(found.near_ties)


@pytest.fixture(scope="module")
def reference(example: Served, running_example: Running) -> Reference:
    target, tokenizer = open_target(example.target, ()), load_tokenizer(example.target)
    prompts = [encode_prompt(tokenizer, prompt) for prompt in PROMPTS]
    outputs = [
        generate_plain(target, ids, max_new_tokens=MAX_TOKENS, eos_ids=target.eos_ids).token_ids for ids in prompts
    ]
    return Reference(target, tokenizer, prompts, outputs)


def request(prompt: str, **changes: Any) -> dict[str, Any]:
    return {"text_input": prompt, "chat": True, "max_tokens": MAX_TOKENS, **changes}


def test_health_and_configuration(server: Server) -> None:
    import tritonclient.grpc as grpc
    import tritonclient.http as http

    for client in (http.InferenceServerClient(server.http), grpc.InferenceServerClient(server.grpc)):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("dspine")
    config = http.InferenceServerClient(server.http).get_model_config("dspine")
    assert config["model_transaction_policy"]["decoupled"] is True
    assert not ready(server, "/v2/models/dspine_drafter/ready"), "loaded only where DSPINE_MODELS names it"


def test_sixteen_streams_at_once_equal_the_target_alone(server: Server, reference: Reference) -> None:
    """Half over HTTP, half over gRPC; tokens are equal, and the streamed pieces join to the text of those tokens."""

    def stream(which: int) -> Sample:
        over_http = which % 2 == 0
        client = HttpClient(server.http, "dspine") if over_http else GrpcClient(server.grpc, "dspine")
        try:
            return client.generate(which, request(PROMPTS[which]))
        finally:
            client.close()

    before = metrics(server)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        samples = list(pool.map(stream, range(len(PROMPTS))))
    assert not [sample.error for sample in samples if sample.error]
    near_ties = sum(reference.near_ties(sample.prompt, sample.tokens) for sample in samples)
    assert near_ties <= 1
    for sample in samples:
        assert sample.text == reference.tokenizer.decode(sample.tokens, skip_special_tokens=True)
        assert len(sample.arrivals) > 1, "it came in pieces"
    check_counters(server, before, samples)


def check_counters(server: Server, before: Any, samples: list[Sample]) -> None:
    """What the responses say and what the metrics say is the same."""

    def grown(name: str, **labels: str) -> float:
        return value(metrics(server), name, **labels) - value(before, name, **labels)

    def total(name: str) -> float:
        return sum(sample.final[name] for sample in samples)

    assert eventually(lambda: grown("dspine_requests_total", outcome="ok") == len(samples))
    assert grown("dspine_requests_total") == len(samples)
    assert grown("dspine_generated_tokens_total") == total("completion_tokens")
    assert grown("dspine_prompt_tokens_total") == total("prompt_tokens")
    assert grown("dspine_drafted_tokens_total") == total("total_draft_tokens")
    assert grown("dspine_accepted_tokens_total") == total("total_accepted_draft_tokens")
    committed = total("completion_tokens") - len(samples)  # the first token of each comes from its prompt
    assert grown("dspine_accepted_length_sum") == committed
    rounds = sum((sample.final["completion_tokens"] - 1) / sample.final["acceptance_length"] for sample in samples)
    assert grown("dspine_sequence_rounds_total") == pytest.approx(rounds, abs=0.01)
    assert grown("dspine_accepted_length_count") == grown("dspine_accepted_length_bucket", le="+Inf") == round(rounds)
    assert value(metrics(server), "dspine_slots") == SLOTS
    assert grown("dspine_accepted_tokens_total") > 0, "speculation is at work"


def test_single_response(server: Server, reference: Reference) -> None:
    answer = generate(server, request(PROMPTS[0]))
    assert answer.status == 200
    reference.near_ties(0, answer.json["output_ids"])
    assert answer.json["finish_reason"] in ("length", "stop")
    assert answer.json["completion_tokens"] == len(answer.json["output_ids"])
    assert answer.json["time_to_first_token"] >= answer.json["queue_seconds"] >= 0


def test_generate_stream_is_a_stream_of_events(server: Server) -> None:
    connection = HTTPConnection(server.http, timeout=60)
    connection.request("POST", "/v2/models/dspine/generate_stream", json.dumps(request(PROMPTS[1], stream=True)))
    answer = connection.getresponse()
    assert answer.getheader("Content-Type", "").startswith("text/event-stream")
    events = [json.loads(line[5:]) for line in answer if line.startswith(b"data:")]
    assert [("finish_reason" in event) for event in events] == [False] * (len(events) - 1) + [True]


def test_without_speculation(server: Server, reference: Reference) -> None:
    answer = generate(server, request(PROMPTS[2], num_draft_tokens=0))
    reference.near_ties(2, answer.json["output_ids"])
    assert answer.json["total_draft_tokens"] == 0
    assert answer.json["acceptance_length"] == 1


def test_stop_words_and_chats(server: Server, reference: Reference) -> None:
    whole = reference.tokenizer.decode(reference.outputs[3], skip_special_tokens=True)
    word = whole.split()[3]
    chat = json.dumps([{"role": "user", "content": PROMPTS[3]}])
    body = {"messages": chat, "max_tokens": MAX_TOKENS, "stop_words": [word]}
    answer = generate(server, body)
    assert answer.status == 200, answer.text
    assert answer.json["text_output"] == whole[: whole.index(word)]
    assert answer.json["finish_reason"] == "stop"


def test_sampling_follows_the_seed(server: Server) -> None:
    heat = {"temperature": 0.9, "top_p": 0.9}
    first, again, other = (
        generate(server, request(PROMPTS[4], random_seed=seed, **heat)).json["output_ids"] for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_cancellation_in_mid_stream_frees_the_slot(server: Server, protocol: str) -> None:
    assert eventually(lambda: value(metrics(server), "dspine_slots_in_use") == 0)
    before = metrics(server)
    if protocol == "http":
        connection = HTTPConnection(server.http, timeout=60)
        connection.request("POST", "/v2/models/dspine/generate_stream", json.dumps({**LONG, "stream": True}))
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data:")
        assert eventually(lambda: value(metrics(server), "dspine_slots_in_use") == 1)
        answer.close()
        connection.close()
    else:
        client = GrpcClient(server.grpc, "dspine")
        started = threading.Thread(target=client.generate, args=(0, LONG), daemon=True)
        started.start()
        assert eventually(lambda: value(metrics(server), "dspine_slots_in_use") == 1)
        client._client.stop_stream(cancel_requests=True)
    assert eventually(lambda: value(metrics(server), "dspine_slots_in_use") == 0)
    cancelled = [value(found, "dspine_requests_total", outcome="cancelled") for found in (before, metrics(server))]
    assert cancelled[1] == cancelled[0] + 1
    assert generate(server, request(PROMPTS[0], max_tokens=2)).status == 200


MALFORMED: dict[str, tuple[Any, str]] = {
    "wrong type": ({"text_input": "a", "max_tokens": "many"}, ""),
    "wrong shape": ({"text_input": ["a", "b"]}, "text_input"),
    "negative max_tokens": ({"text_input": "a", "max_tokens": -1}, "max_tokens"),
    "no prompt": ({"max_tokens": 4}, "prompt"),
    "two prompts": ({"text_input": "a", "input_ids": [1, 2]}, "prompt"),
    "negative temperature": ({"text_input": "a", "temperature": -0.5}, "temperature"),
    "top_p out of range": ({"text_input": "a", "temperature": 1.0, "top_p": 1.5}, "top_p"),
    "more drafts than a block": ({"text_input": "a", "num_draft_tokens": 99}, "num_draft_tokens"),
    "a megabyte of text": ({"text_input": "word " * 200_000}, "bytes"),
    "prompt over the limit": ({"text_input": "word " * MAX_SEQ_LEN}, "too long"),
    "token ids out of range": ({"input_ids": [10**7], "max_tokens": 2}, "vocabulary"),
    "not a chat": ({"messages": "[1, 2]"}, "messages"),
    "empty stop word": ({"text_input": "a", "stop_words": ""}, "stop_words"),
    "deadline in the past": ({"text_input": "a", "deadline_ms": -5}, "deadline_ms"),
    "a field of another server": ({"text_input": "a", "max_tokens": 2, "seed": 3}, "random_seed"),
    "a misspelt field": ({"text_input": "a", "max_tokns": 2}, "max_tokens"),
    "no JSON": (b"{", ""),
    "invalid UTF-8": (b'{"text_input": "\xff\xfe", "max_tokens": 2}', ""),
}


def test_malformed_requests_are_answered_while_others_go_on(server: Server, reference: Reference) -> None:
    """One stream runs through all of it."""
    client = HttpClient(server.http, "dspine")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(client.generate, 5, {**LONG, "text_input": PROMPTS[5], "max_tokens": 120})
        for name, (body, words) in MALFORMED.items():
            answer = generate(server, body)
            assert 400 <= answer.status < 600, f"{name}: {answer}"
            assert "error" in answer.text, name
            assert words in answer.text, f"{name}: {answer.text[:300]}"
            assert "Traceback" not in answer.text, name
        assert not other.done(), "the other stream was running all the time"
        sample = other.result(timeout=120)
    assert sample.error is None
    assert sample.tokens[: MAX_TOKENS - 1] == reference.outputs[5][: MAX_TOKENS - 1]
    assert ready(server, "/v2/models/dspine/ready")


def test_malformed_tensors_over_grpc(server: Server) -> None:
    import numpy as np
    import tritonclient.grpc as grpc

    def refused(*inputs: Any) -> str:
        answers: list[Any] = []
        done = threading.Event()

        def take(result: Any, error: Any) -> None:
            answers.append(error)
            done.set()

        client = grpc.InferenceServerClient(server.grpc)
        client.start_stream(callback=take)
        client.async_stream_infer("dspine", list(inputs))
        assert done.wait(30)
        client.stop_stream()
        return str(answers[0])

    def tensor(name: str, data: Any, kind: str) -> Any:
        made = grpc.InferInput(name, list(data.shape), kind)
        made.set_data_from_numpy(data)
        return made

    text = tensor("text_input", np.array([b"a"], dtype=np.object_), "BYTES")
    assert "max_tokens" in refused(text, tensor("max_tokens", np.array([1.5], dtype=np.float32), "FP32"))
    assert "shape" in refused(text, tensor("max_tokens", np.array([1, 2], dtype=np.int32), "INT32"))
    assert "UTF-8" in refused(tensor("text_input", np.array([b"ab\xff\xfe"], dtype=np.object_), "BYTES"))
    assert "no_such" in refused(text, tensor("no_such", np.array([1], dtype=np.int32), "INT32"))


@pytest.mark.parametrize("limit", [{"deadline_ms": 300}, {"timeout": 300_000}], ids=str)
def test_deadline(server: Server, limit: dict[str, int]) -> None:
    answer = generate(server, {**LONG, **limit})
    assert answer.status >= 400
    assert "deadline" in answer.text
    assert eventually(lambda: value(metrics(server), "dspine_slots_in_use") == 0)


def test_dashboard_asks_for_metrics_that_exist(running_example: Running) -> None:
    """Every family in a query is exported, and with the labels the query uses."""
    board = json.loads((running_example.repository / "grafana" / "dashboard.json").read_text())
    exported = metrics(running_example.server)
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 15
    for expression in expressions:
        families = re.findall(r"\b(?:dspine|nv)_\w+", expression)
        assert families, expression
        for family in families:
            if family.startswith("nv_gpu"):  # this machine has none
                continue
            assert family in exported, f"{family} in {expression}"
            labels = set(exported[family][0][0])
            used = re.findall(r"by \(([^)]*)\)", expression) + re.findall(r"\{(\w+)=", expression)
            assert set(used) <= labels, f"{family} has {labels}, {expression} uses {used}"
        assert expression.count("(") == expression.count(")")
    legends = {
        label
        for panel in board["panels"]
        for t in panel["targets"]
        for label in re.findall(r"\{\{(\w+)\}\}", t["legendFormat"])
    }
    assert legends <= {"outcome", "le", "section", "reason", "gpu_uuid"}


def test_probes_and_ports_are_those_of_the_server(running_example: Running) -> None:
    values = yaml.safe_load((running_example.repository / "k8s" / "values.yaml").read_text())
    assert ready(running_example.server, values["readinessProbe"]["httpGet"]["path"])
    annotations = values["podAnnotations"]
    assert annotations["prometheus.io/path"] == "/metrics"
    command = values["livenessProbe"]["exec"]["command"][2:]
    probe = [sys.executable, str(running_example.repository / "probe.py"), *command]
    subprocess.run([*probe, "--url", f"http://{running_example.server.http}"], check=True, timeout=60)


def test_readme_commands(running_example: Running) -> None:
    """The request of the project's README, and the repository's client, as they are printed."""
    server = running_example.server
    section = (ROOT / "README.md").read_text().split("## Triton Inference Server")[1].split("\n## ")[0]
    calls = re.findall(r"^curl (?:.*\\\n)*.*$", section, re.MULTILINE)
    assert calls
    for call in calls:
        command = shlex.split(call.replace("\\\n", " ").replace("127.0.0.1:8000", server.http))
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert '"text_output"' in answer.stdout
    programs = re.findall(r"^python3 (\w+\.py [^#\n]*)", section, re.MULTILINE)
    assert [line.split()[0] for line in programs] == ["client.py", "probe.py"]
    for line in programs:
        limit = ["--max-tokens", "8"] if line.startswith("client") else []
        command = [sys.executable, *shlex.split(line), "--url", f"http://{server.http}", *limit]
        run = subprocess.run(
            command, cwd=running_example.repository, capture_output=True, text=True, check=False, timeout=120
        )
        assert run.returncode == 0, run.stderr
        if limit:
            assert run.stdout.strip()
            assert json.loads(run.stderr)["completion_tokens"] == 8


def test_load_generator(running_example: Running, tmp_path: Path) -> None:
    """tools/serve_load.py over both protocols, small."""
    from tools.serve_load import main

    server, out = running_example.server, tmp_path / "load.json"
    small = ["--prompt-count", "2", "--max-tokens", "6", "--concurrency", "2", "--requests-per-client", "1"]
    for address in (["--http", server.http], ["--http", server.http, "--grpc", server.grpc]):
        assert main([*address, *small, "--out", str(out)]) == 0
        record = json.loads(out.read_text())
        assert [run["draft_tokens"] for run in record["runs"]] == ["all", 0]
        for run in record["runs"]:
            assert (run["requests"], run["failed"], run["tokens"]) == (2, 0, 12)
            assert run["time_to_first_token_ms"]["p50"] > 0
        assert record["runs"][1]["acceptance_length"] == 1


def test_requests_do_not_grow_the_servers_shared_memory(server: Server) -> None:
    sizes = []
    for _ in range(2):
        for _ in range(5):
            assert post(server, "/v2/models/dspine/generate", {"text_input": "x" * 5000, "max_tokens": 1}).status == 400
        sizes.append(sum(path.stat().st_size for path in server.shared_memory()))
        time.sleep(0.2)
    assert sizes[0] == sizes[1]
