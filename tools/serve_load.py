"""Load on a served model: throughput, time to first token, inter-token latency and acceptance, with DSpine and without.

    python -m tools.serve_load --http 127.0.0.1:8000 --model dspine --out load.json
    python -m tools.serve_load --launch REPOSITORY --target-model TARGET --soak 15 --concurrency 64 --out soak.json

`--launch` starts the repository's launch.sh (TRITON_HOME and PYTHON as it says) on free ports and stops it afterwards; without it a
server must be running. `--target-model` compares every greedy stream with what the target writes alone, token for token, near-ties
counted. `--soak MINUTES` keeps one concurrency up and samples the server's memory. Every client sends its next request when its last
one has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

from tools.serving.clients import Client, GrpcClient, HttpClient, Sample
from tools.serving.figures import summarise
from tools.serving.memory import MemoryTrace

ROOT = Path(__file__).resolve().parents[1]
READY_S, STOP_S = 600, 60
LEVELS = (1, 4, 16, 64)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--http", default="127.0.0.1:8000", help="address of the HTTP endpoint")
    add("--grpc", help="address of the gRPC endpoint; the load then goes over gRPC")
    add("--launch", type=Path, metavar="REPOSITORY", help="start this repository's server first")
    add("--server-pid", type=int, help="process whose memory is sampled, of a server that was not launched here")
    add("--model", default="dspine")
    add_load_options(add, prompts=32, max_tokens=64)
    add("--target-model", type=Path, help="compare with the target's own greedy output")
    add("--device", default="cpu", help="of the comparison")
    add("--dtype", default="float32", help="of the comparison")
    return parser.parse_args(argv)


def add_load_options(add: Callable[..., object], prompts: int, max_tokens: int) -> None:
    """The load itself; `prompts` and `max_tokens` are defaults."""
    files = sorted((ROOT / "tests" / "data" / "prompts").glob("*.jsonl"))
    add("--prompts", type=Path, nargs="+", default=files)
    add("--prompt-count", type=int, default=prompts, help="different prompts, taken in turn from the files")
    add("--max-tokens", type=int, default=max_tokens)
    add("--concurrency", type=int, nargs="+", default=list(LEVELS))
    add("--requests-per-client", type=int, default=4)
    add("--draft-tokens", type=int, nargs="+", default=[-1, 0], help="-1: as many as the drafter has; 0: none")
    add("--soak", type=float, metavar="MINUTES", help="one long run at the first concurrency")
    add("--out", type=Path, required=True)


def main(argv: list[str] | None = None) -> int:
    """Run, write the record, and fail if a request did or a stream differs."""
    options = parse_arguments(argv)
    prompts = read_prompts(options.prompts, options.prompt_count)
    record = provenance() | {"max_tokens": options.max_tokens, "prompts": len(prompts), "model": options.model}
    with launched(options) if options.launch else nullcontext():
        record["protocol"] = "grpc" if options.grpc else "http"
        send(options, 0, prompts[0], options.draft_tokens[0])  # connections and caches
        samples: list[Sample] = []
        if options.soak:
            record["soak"], samples = soak(options, prompts)
        else:
            record["runs"] = []
            for level in options.concurrency:
                for drafts in options.draft_tokens:
                    run, found = measure(options, prompts, level, drafts)
                    record["runs"].append(run)
                    samples += found
                    write(options, record)  # what is measured stays, whatever ends the run
                    print(
                        json.dumps({key: run[key] for key in ("concurrency", "draft_tokens", "tokens_per_second")}),
                        flush=True,
                    )
    if options.target_model:
        record["greedy"] = compare(options, prompts, samples)
    record["load_average_after"] = [round(value, 2) for value in os.getloadavg()]
    return finish(options, record, samples)


def finish(options: argparse.Namespace, record: dict[str, Any], samples: list[Sample]) -> int:
    """Writes the record; 1 if a request failed or a stream differs."""
    write(options, record)
    failed = sum(sample.error is not None for sample in samples)
    differing = record["greedy"]["different"] if "greedy" in record else 0
    compared = f"{differing} differ from greedy" if "greedy" in record else "not compared with greedy"
    print(f"{len(samples)} requests, {failed} failed, {compared}; {options.out}")
    return 1 if failed or differing else 0


def write(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """The record so far."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


def read_prompts(files: list[Path], wanted: int) -> list[str]:
    """First turns, one file after the other in turn, so that every kind is in the load."""
    lists = [
        [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines() if line]
        for file in files
    ]
    mixed = [texts[i] for i in range(max(map(len, lists))) for texts in lists if i < len(texts)]
    return mixed[:wanted]


def connect(options: argparse.Namespace) -> Client:
    """A client of its own for one thread."""
    return GrpcClient(options.grpc, options.model) if options.grpc else HttpClient(options.http, options.model)


def send(options: argparse.Namespace, number: int, prompt: str, drafts: int, client: Client | None = None) -> Sample:
    """One greedy request."""
    request: dict[str, Any] = {"text_input": prompt, "chat": True, "max_tokens": options.max_tokens}
    if drafts >= 0:
        request["num_draft_tokens"] = drafts
    own = client or connect(options)
    try:
        return own.generate(number, request)
    finally:
        if client is None:
            own.close()


def drive(
    options: argparse.Namespace, prompts: list[str], level: int, drafts: int, more: Callable[[int], bool]
) -> tuple[list[Sample], float]:
    """`level` clients, each sending request after request while ``more(number of the request)`` holds."""
    numbers, lock, samples = count(), threading.Lock(), list[Sample]()

    def client() -> None:
        own = connect(options)
        while True:
            with lock:
                number = next(numbers)
            if not more(number):
                break
            which = number % len(prompts)
            sample = send(options, which, prompts[which], drafts, own)
            with lock:
                samples.append(sample)
        own.close()

    threads = [threading.Thread(target=client) for _ in range(level)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return samples, time.perf_counter() - started


def measure(
    options: argparse.Namespace, prompts: list[str], level: int, drafts: int
) -> tuple[dict[str, Any], list[Sample]]:
    """One run of a fixed number of requests."""
    total = level * options.requests_per_client
    samples, wall = drive(options, prompts, level, drafts, lambda number: number < total)
    return {"concurrency": level, "draft_tokens": drafts if drafts >= 0 else "all", **summarise(samples, wall)}, samples


def soak(options: argparse.Namespace, prompts: list[str]) -> tuple[dict[str, Any], list[Sample]]:
    """One run of a fixed time, with the server's memory."""
    level, minutes = options.concurrency[0], options.soak
    trace = MemoryTrace(options.server_pid) if options.server_pid else None
    deadline = time.monotonic() + minutes * 60
    samples, wall = drive(options, prompts, level, options.draft_tokens[0], lambda _number: time.monotonic() < deadline)
    record = {"minutes": minutes, "concurrency": level, **summarise(samples, wall)}
    if trace:
        trace.stop()
        record["memory"] = trace.summary()
    return record, samples


def compare(options: argparse.Namespace, prompts: list[str], samples: list[Sample]) -> dict[str, Any]:
    """Every stream against the target's own greedy output: one reference per prompt, one comparison per different output."""
    from dspine_export.runtime.generate import generate_plain
    from dspine_export.runtime.load_target import open_target
    from dspine_export.runtime.lossless import compare_greedy
    from dspine_export.runtime.prompts import encode_prompt, load_tokenizer

    target = open_target(options.target_model, (), dtype=options.dtype, device=options.device)
    tokenizer = load_tokenizer(options.target_model)
    result: dict[str, Any] = {"streams": 0, "equal": 0, "with_near_ties": 0, "different": 0, "differences": []}
    for number, prompt in enumerate(prompts):
        outputs = [tuple(sample.tokens) for sample in samples if sample.prompt == number and sample.error is None]
        if not outputs:
            continue
        ids = encode_prompt(tokenizer, prompt)
        reference = generate_plain(target, ids, max_new_tokens=options.max_tokens, eos_ids=target.eos_ids).token_ids
        for output in set(outputs):
            found = compare_greedy(target, ids, output, max_new_tokens=options.max_tokens, reference=reference)
            kind = "different" if not found.equal else "with_near_ties" if found.near_ties else "equal"
            result[kind] += outputs.count(output)
            if not found.equal:
                result["differences"].append({"prompt": number, "at": found.first_difference, "lead": found.lead})
        result["streams"] += len(outputs)
    return result


@contextmanager
def launched(options: argparse.Namespace) -> Iterator[None]:
    """Start the repository's server in a session of its own and stop it afterwards; fills in addresses and process id."""
    http, grpc, metrics = free_port(), free_port(), free_port()
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}", "--allow-gpu-metrics=false"]
    options.shared_memory = (
        f"dspine-load-{os.getpid()}-"  # what the names of this server's files in /dev/shm begin with
    )
    ports.append(f"--backend-config=python,shm-region-prefix-name={options.shared_memory}")
    log = options.out.with_suffix(".server.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        command = [str(options.launch / "launch.sh"), *ports]
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    options.http, options.server_pid = f"127.0.0.1:{http}", server.pid
    options.grpc = f"127.0.0.1:{grpc}" if options.grpc else None
    try:
        wait_until_ready(f"http://{options.http}/v2/models/{options.model}/ready", server, log)
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            server.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Poll until the model is ready; raises SystemExit with the log's end if the server ends or takes too long."""
    deadline = time.monotonic() + READY_S
    while True:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(
                f"the server is not ready (exit code {server.poll()}):\n{log.read_text(errors='replace')[-4000:]}"
            )
        time.sleep(0.2)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def provenance(tool: str = "serve_load") -> dict[str, Any]:
    """Command, date, commit and machine of a record."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": f"python -m tools.{tool} "
        + " ".join(Path(word).name if "/" in word else word for word in sys.argv[1:]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or None,
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
        "load_average_before": [round(value, 2) for value in os.getloadavg()],
    }


if __name__ == "__main__":
    sys.exit(main())
