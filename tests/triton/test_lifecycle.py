"""What happens to a server whose models come, go, die or cannot be loaded; and the token-level model. A tiny pair, explicit control."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dspine_export.model.loading import load_checkpoint
from dspine_export.runtime.load_target import open_target
from dspine_export.triton import model_config

from .calls import eventually, generate, load, metrics, unload, value
from .conftest import ROOT, Served
from .server import Server, install_tree, ready, running, wheel_folder

pytestmark = pytest.mark.skipif(wheel_folder() is None, reason="no tritonserver: make test-triton installs one")

SLOTS, CYCLES = 2, 20
DEAD = "is not healthy"


@dataclass(frozen=True)
class Running:
    """`repository` serves the models `dspine` and `dspine_drafter`, `second` the model `single`, which does not stream."""

    server: Server
    repository: Path
    second: Path


def make_repository(served: Served, output: Path, *options: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "dspine_export",
        "triton-repo",
        str(served.bundle),
        "--target-model",
        str(served.target),
    ]
    light = ["--max-batch-size", str(SLOTS), "--max-seq-len", "200", "--set", "executor=torch", "--set", "warmup=false"]
    subprocess.run([*command, "-o", str(output), "--files", "copy", *light, *options], cwd=ROOT, check=True)
    return output


@pytest.fixture(scope="module")
def started(tiny: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("lifecycle")
    repository = make_repository(tiny, folder / "repository", "--set", "max_queue=1")
    second = make_repository(tiny, folder / "second", "--name", "single", "--no-decoupled")
    environment = {
        "TRITON_HOME": str(install_tree(folder / "triton")),
        "PYTHON": sys.executable,
        "DSPINE_MODELS": "dspine dspine_drafter",
    }
    command = [str(repository / "launch.sh"), f"--model-repository={second / 'model_repository'}"]
    with running(command, folder, environment) as server:
        yield Running(server, repository, second)


@pytest.fixture
def server(started: Running) -> Server:
    return started.server


def probe(started: Running, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(started.repository / "probe.py"), "--url", f"http://{started.server.http}"]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=120)


class Drafting:
    """A client of the token-level model: one gRPC connection, one sequence per correlation id."""

    def __init__(self, server: Server) -> None:
        import tritonclient.grpc as grpc

        self._grpc = grpc
        self._client = grpc.InferenceServerClient(server.grpc)

    def step(self, sequence: int, *, start: bool = False, end: bool = False, **inputs: Any) -> dict[str, Any]:
        tensors = []
        for name, array in inputs.items():
            kind = {"float32": "FP32", "int32": "INT32", "int64": "INT64", "uint64": "UINT64"}[str(array.dtype)]
            tensor = self._grpc.InferInput(name, list(array.shape), kind)
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        result = self._client.infer(
            "dspine_drafter", tensors, sequence_id=sequence, sequence_start=start, sequence_end=end
        )
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def test_drafter_sequences(server: Server, tiny: Served) -> None:
    """Two interleaved sequences draft what the torch model drafts; one is rolled back on the way."""
    import numpy as np

    target = open_target(tiny.target, ())
    loaded = load_checkpoint(tiny.bundle / "drafter")
    rows = loaded.config.vocab_size
    drafter = loaded.bind(embed_tokens=target.embed_tokens[:rows], lm_head=target.lm_head[:rows])
    width = loaded.config.num_taps * loaded.config.hidden_size
    states = torch.randn(2, 9, width, generator=torch.Generator().manual_seed(0))
    client = Drafting(server)

    def expected(which: int, length: int, anchor: int) -> Any:
        return drafter.draft(torch.tensor([anchor]), states[which : which + 1, :length], torch.tensor([length]))

    def anchor(token: int) -> Any:
        return np.array([token], dtype=np.int64)

    for which in (0, 1):
        found = client.step(10 + which, start=True, target_hidden=states[which, :4].numpy(), anchor_id=anchor(which))
        assert found["context_length"].tolist() == [4]
        wanted = expected(which, 4, which)
        assert found["draft_tokens"].tolist() == wanted.tokens[0].tolist()
        assert found["candidate_ids"].tolist() == wanted.candidate_ids[0].tolist()
    client.step(10, target_hidden=states[0, 4:].numpy())
    found = client.step(10, truncate_to=np.array([6], dtype=np.int64), anchor_id=anchor(77))
    assert found["context_length"].tolist() == [6]
    assert found["draft_tokens"].tolist() == expected(0, 6, 77).tokens[0].tolist()
    padded = np.concatenate([states[1, 4:6].numpy(), np.full((3, width), 9.0, dtype=np.float32)])
    found = client.step(11, end=True, target_hidden=padded, count=np.array([2], dtype=np.int32), anchor_id=anchor(5))
    assert found["draft_tokens"].tolist() == expected(1, 6, 5).tokens[0].tolist()
    with pytest.raises(Exception, match="sequence"):
        client.step(11, anchor_id=anchor(1))  # it has ended
    client.step(10, end=True)


def test_drafter_mistakes_stay_with_their_request(server: Server) -> None:
    import numpy as np

    client = Drafting(server)
    hidden = np.zeros((2, 64), dtype=np.float32)
    client.step(20, start=True, target_hidden=hidden)
    for inputs, words in (
        ({"target_hidden": np.full((1, 64), np.nan, dtype=np.float32)}, "NaN"),
        ({"target_hidden": np.zeros((1, 63), dtype=np.float32)}, "63"),
        ({"target_hidden": hidden, "count": np.array([3], dtype=np.int32)}, "count"),
        ({"anchor_id": np.array([10**6], dtype=np.int64)}, "anchor_id"),
        ({"truncate_to": np.array([99], dtype=np.int64)}, "truncate_to"),
        ({"target_hidden": np.zeros((300, 64), dtype=np.float32)}, "too long"),
    ):
        with pytest.raises(Exception, match=words):
            client.step(20, **inputs)
    assert client.step(20, end=True)["context_length"].tolist() == [2], "none of that was committed"


def test_full_queue_is_said_to_be_one(server: Server) -> None:
    body = {"text_input": "a", "max_tokens": 150, "ignore_eos": True}
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(generate(server, body))) for _ in range(SLOTS + 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [answer for answer in answers if answer.status != 200]
    assert len(answers) - len(refused) >= SLOTS
    assert refused, "eight at once, room for two and a queue of one"
    assert all("overloaded" in answer.text and answer.status == 400 for answer in refused)
    counted = lambda: value(metrics(server), "dspine_requests_total", outcome="overloaded")  # noqa: E731
    assert eventually(lambda: counted() == len(refused))


def test_model_that_does_not_stream(server: Server) -> None:
    import numpy as np
    import tritonclient.http as http

    assert load(server, "single").status == 200
    client = http.InferenceServerClient(server.http)
    text = http.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"abc"], dtype=np.object_))
    tokens = http.InferInput("max_tokens", [1], "INT32")
    tokens.set_data_from_numpy(np.array([6], dtype=np.int32))
    result = client.infer("single", [text, tokens])
    assert len(result.as_numpy("output_ids")) == result.as_numpy("completion_tokens")[0] <= 6
    streamed = generate(server, {"text_input": "abc", "max_tokens": 6}).json
    assert result.as_numpy("output_ids").tolist() == streamed["output_ids"]
    assert "decoupled" in generate(server, {"text_input": "abc", "stream": True}, model="single").text
    unload(server, "single")


def test_corrupted_bundle_is_refused_at_load(started: Running) -> None:
    """The error says how to get a good one; the models that are loaded go on."""
    server, file = started.server, started.second / "bundle" / "drafter" / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        answer = load(server, "single")
        assert answer.status == 400
        for words in ("was changed", "model.safetensors", "dspine-export build"):
            assert words in answer.text
        assert "Traceback" not in answer.text
        assert not ready(server, "/v2/models/single/ready")
        assert generate(server, {"text_input": "abc", "max_tokens": 2}).status == 200
    finally:
        file.write_bytes(good)
    assert load(server, "single").status == 200
    unload(server, "single")


@pytest.mark.parametrize("damage", ["unknown parameter", "missing target", "no bundle"])
def test_unfit_configuration_is_refused_at_load(started: Running, damage: str) -> None:
    server, path = started.server, started.second / "model_repository" / "single" / "config.pbtxt"
    good = path.read_text()
    config = model_config.parse(good)
    name, wrong = {
        "unknown parameter": ("max_slotz", "4"),
        "missing target": ("target_model", "../nowhere"),
        "no bundle": ("bundle", "../model_repository"),
    }[damage]
    config.parameters[name].string_value = wrong
    path.write_text(model_config.render(config))
    try:
        answer = load(server, "single")
        assert answer.status == 400
        assert wrong.strip("./") in answer.text
        assert "Traceback" not in answer.text
    finally:
        path.write_text(good)


def test_killed_backend_process(started: Running) -> None:
    """Triton does not restart the process of a streaming model: the probe tells, and repairs.

    Requests that come later are answered with an error at once. A stream that was running hears nothing more, so clients need a timeout.
    What Triton's own readiness says is left open: it has stayed ready, and it has not.
    """
    server = started.server
    assert probe(started).returncode == 0
    (process,) = server.stub_processes("dspine")
    cut: list[Any] = []
    body = {"text_input": "a", "max_tokens": 150, "ignore_eos": True}

    def stream() -> None:
        try:
            cut.append(generate(server, body, timeout=6))
        except OSError as error:
            cut.append(error)

    thread = threading.Thread(target=stream)
    thread.start()
    time.sleep(0.2)
    os.kill(process, signal.SIGKILL)
    assert eventually(lambda: DEAD in generate(server, {"text_input": "a", "max_tokens": 1}, timeout=10).text)
    assert Drafting(server).step(30, start=True, end=True)["context_length"].tolist() == [0], "the other model goes on"
    found = probe(started)
    assert found.returncode == 1 and DEAD in found.stderr
    found = probe(started, "--reload")
    assert found.returncode == 0, found.stderr
    assert "loaded again" in found.stderr
    assert generate(server, {"text_input": "a", "max_tokens": 2}).status == 200
    assert server.stub_processes("dspine") != [process]
    thread.join(30)
    assert len(cut) == 1, "the client's own timeout, or an answer that made it before the kill"


def test_probe_leaves_a_busy_server_alone(started: Running) -> None:
    assert probe(started, "--reload").returncode == 0
    body = {"text_input": "a", "max_tokens": 190, "ignore_eos": True}
    threads = [threading.Thread(target=generate, args=(started.server, body)) for _ in range(SLOTS + 1)]
    for thread in threads:
        thread.start()
    before = started.server.stub_processes("dspine")
    assert probe(started, "--reload", "--timeout", "4").returncode == 0
    assert started.server.stub_processes("dspine") == before
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(("model", "cycles"), [("dspine_drafter", CYCLES), ("dspine", 5)])
def test_loads_and_unloads_leak_nothing(started: Running, model: str, cycles: int) -> None:
    """The text model is unloaded under a stream, which is served to its end."""
    server, body = started.server, {"text_input": "a", "max_tokens": 40, "ignore_eos": True}
    for other in ("dspine_drafter", "dspine"):
        unload(server, other)
        assert eventually(lambda name=other: not server.stub_processes(name))
    (process,) = [p for p in psutil.Process(server.process.pid).children() if p.name() == "tritonserver"]
    regions, used = [len(server.shared_memory())], list[float]()
    for _ in range(cycles):
        assert load(server, model).status == 200
        assert ready(server, f"/v2/models/{model}/ready")
        with ThreadPoolExecutor(1) as pool:
            stream = pool.submit(generate, server, body) if model == "dspine" else None
            if stream is not None:
                assert eventually(lambda one=stream: one.done() or value(metrics(server), "dspine_slots_in_use") == 1)
            assert unload(server, model).status == 200
            assert stream is None or stream.result().status == 200
        assert eventually(lambda: not server.stub_processes(model))
        used.append(process.memory_full_info().uss / 1e6)
        regions.append(len(server.shared_memory()))
    assert regions[-1] == regions[0], regions
    assert used[-1] - used[cycles // 4] < 4, f"megabytes: {used}"
    assert not psutil.Process(server.process.pid).children(recursive=False)[1:], "nothing but the server is left"


def test_two_instances_share_the_requests(started: Running) -> None:
    server, path = started.server, started.second / "model_repository" / "single" / "config.pbtxt"
    good = path.read_text()
    config = model_config.parse(good)
    config.instance_group[0].count = 2
    path.write_text(model_config.render(config))
    try:
        assert load(server, "single").status == 200
    finally:
        path.write_text(good)
    processes = [psutil.Process(process) for process in server.stub_processes("single")]
    before = [process.cpu_times().user for process in processes]
    body = {"text_input": "a", "max_tokens": 150, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _n: generate(server, body, model="single"), range(8)))
    assert {answer.status for answer in answers} == {200}
    assert len({tuple(answer.json["output_ids"]) for answer in answers}) == 1
    worked = [process.cpu_times().user - used for process, used in zip(processes, before, strict=True)]
    assert len(worked) == 2 and min(worked) > 0.05, worked
    assert eventually(lambda: value(metrics(server), "dspine_requests_total", "single", outcome="ok") >= 8)
    assert value(metrics(server), "dspine_slots", "single") == 2 * SLOTS, "gauges of one do not overwrite the other's"
    unload(server, "single")
    assert eventually(lambda: not server.stub_processes("single"))


def test_stopping_the_server_leaves_nothing(tiny: Served, tmp_path: Path) -> None:
    """Processes, shared memory, the temporary backend directory."""
    repository = make_repository(tiny, tmp_path / "repository")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {
        "TRITON_HOME": str(install_tree(tmp_path / "triton")),
        "PYTHON": sys.executable,
        "TMPDIR": str(temporary),
    }
    with running([str(repository / "launch.sh")], tmp_path, environment) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert generate(server, {"text_input": "a", "max_tokens": 2}).status == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(40) == 0
        assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        assert not server.shared_memory()
        assert not list(temporary.iterdir())
    shutil.rmtree(repository)
