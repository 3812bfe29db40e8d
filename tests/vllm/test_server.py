"""``vllm serve TARGET --speculative-model dspine``, started once: completions, a stream, a JSON schema, counters."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import BLOCK_SIZE, ENVIRONMENT, ON_GPU

START_S = 300
MODEL = "pair"


class Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.address, self.log = process, f"http://127.0.0.1:{port}", log

    def wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                self.get("/health")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.5)
        pytest.fail(f"vllm serve did not start:\n{self.log.read_text(errors='replace')[-6000:]}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return str(answer.read().decode())

    def chat(self, **options: Any) -> Any:
        """The open response to one chat request at temperature 0."""
        document = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, **options}
        request = urllib.request.Request(
            f"{self.address}/v1/chat/completions", json.dumps(document).encode(), {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=120)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{error}: {error.read().decode()}\n{self.log.read_text(errors='replace')[-4000:]}")


@pytest.fixture(scope="module")
def server(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    options = [
        "--speculative-model",
        "dspine",
        "--served-model-name",
        MODEL,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    sizes = [
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
        "--block-size",
        "32",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--log-error-stack",  # vLLM answers an unexpected exception with HTTP 500 and no text
    ]
    compact = {"backend": "xgrammar", "disable_any_whitespace": True}  # a random model would write blanks forever
    sizes += ["--structured-outputs-config", json.dumps(compact)]
    script = Path(sys.executable).with_name("vllm")
    vllm = [str(script)] if script.is_file() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    command = [*vllm, "serve", str(pair.target), *options, *sizes]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "DSPINE_DRAFTER": str(pair.drafter),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    if ON_GPU:  # a stated cache size: other processes may use the device
        command += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 28)]
    else:
        environment["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "fork"  # one import of vLLM instead of three
    with log.open("wb") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    running = Server(process, port, log)
    try:
        running.wait()
        yield running
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def content(server: Server, **options: Any) -> str:
    with server.chat(**options) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def test_chat_and_stream_agree(server: Server) -> None:
    whole = content(server, max_tokens=24, ignore_eos=True)
    pieces = []
    with server.chat(max_tokens=24, ignore_eos=True, stream=True) as answer:
        for line in answer:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                pieces += [choice["delta"].get("content") or "" for choice in json.loads(text)["choices"]]
    assert whole and "".join(pieces) == whole


@pytest.mark.skipif(
    importlib.util.find_spec("lmformatenforcer") is None,
    reason="vLLM imports lm-format-enforcer, a dependency of its own, to validate any structured output",
)
def test_json_schema(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"open": {"type": "boolean"}, "kind": {"enum": ["drafter", "target"]}},
        "required": ["open", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    found = json.loads(content(server, max_tokens=120, response_format=form))
    assert found.keys() == {"open", "kind"} and isinstance(found["open"], bool)


def test_counters(server: Server) -> None:
    content(server, max_tokens=16, ignore_eos=True)
    counters: dict[str, float] = {}
    for line in server.get("/metrics").splitlines():
        if line.startswith("vllm:spec_decode"):
            name, _, value = line.partition("{")[0], *line.rpartition(" ")[1:]
            counters[name] = counters.get(name, 0.0) + float(value)
    drafts = counters["vllm:spec_decode_num_drafts_total"]
    proposed = counters["vllm:spec_decode_num_draft_tokens_total"]
    assert drafts > 0 and 0 < proposed <= drafts * (BLOCK_SIZE - 1)
    accepted = counters["vllm:spec_decode_num_accepted_tokens_total"]
    assert accepted == counters["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
