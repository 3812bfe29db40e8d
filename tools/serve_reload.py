"""Loads and unloads a served model again and again, streams under way when it goes, and counts what stays behind.

    python -m tools.serve_reload --launch REPOSITORY --cycles 20 --out reload.json

Starts the repository's launch.sh (TRITON_HOME and PYTHON as it says) on free ports. A cycle loads the model, starts the streams, unloads
it under them, waits for their ends and for the model's processes to go. Fails if a stream did, or a process, a shared memory file or
more than `--growth` megabytes of the server's own memory stayed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tools.serve_load import launched, provenance, write
from tools.serving.clients import HttpClient, Sample
from tools.serving.memory import tree_bytes

GONE_S = 40.0
SHARED_MEMORY = Path("/dev/shm")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--launch", type=Path, required=True, metavar="REPOSITORY")
    add("--model", default="dspine")
    add("--cycles", type=int, default=20)
    add("--streams", type=int, default=2)
    add("--max-tokens", type=int, default=64)
    add("--lead", type=float, default=0.5, help="seconds the streams run before the model is unloaded under them")
    add(
        "--growth",
        type=float,
        default=4.0,
        help="megabytes the server may grow by after the first quarter of the cycles",
    )
    add("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    options.grpc = None
    return options


def main(argv: list[str] | None = None) -> int:
    """Run, write the record, and fail if something stayed."""
    options = parse_arguments(argv)
    record = provenance("serve_reload") | {"model": options.model, "streams": options.streams, "cycles": []}
    with launched(options):
        server = psutil.Process(options.server_pid)
        for number in range(options.cycles):
            found = cycle(options, server, number > 0)
            record["cycles"].append(found)
            write(options, record)
            print(json.dumps(found), flush=True)
            if found["processes_left"]:
                break
    record["verdict"] = verdict(record["cycles"], options.growth)
    write(options, record)
    print(json.dumps(record["verdict"]))
    return 0 if record["verdict"]["clean"] else 1


def cycle(options: argparse.Namespace, server: psutil.Process, load: bool) -> dict[str, Any]:
    """One cycle, with times in seconds and memory in megabytes."""
    began = time.perf_counter()
    if load:
        ask(options, "load")
    loaded = time.perf_counter()
    with ThreadPoolExecutor(options.streams) as pool:
        streams = [pool.submit(stream, options) for _ in range(options.streams)]
        time.sleep(options.lead)
        running = sum(not one.done() for one in streams)
        served = tree_bytes(server)
        ask(options, "unload")
        samples = [one.result() for one in streams]
    left = wait_for_the_end(server)
    return {
        "load_s": round(loaded - began, 1),
        "unload_s": round(time.perf_counter() - loaded - options.lead, 1),
        "running_at_unload": running,
        "streams_failed": sum(one.error is not None for one in samples),
        "model_mb": round(served["stubs"] / 1e6, 1),
        "server_mb": round(tree_bytes(server)["server"] / 1e6, 1),
        "processes_left": left,
        "shared_memory_files": len(list(SHARED_MEMORY.glob(f"{options.shared_memory}*"))),
    }


def stream(options: argparse.Namespace) -> Sample:
    """One request of a client of its own."""
    client = HttpClient(options.http, options.model)
    try:
        return client.generate(0, {"text_input": "a", "max_tokens": options.max_tokens, "ignore_eos": True})
    finally:
        client.close()


def ask(options: argparse.Namespace, what: str) -> None:
    """Load or unload; returns when the server has answered."""
    url = f"http://{options.http}/v2/repository/models/{options.model}/{what}"
    with urllib.request.urlopen(urllib.request.Request(url, data=b"{}", method="POST"), timeout=300):
        pass


def wait_for_the_end(server: psutil.Process) -> list[int]:
    """Process ids of Python backends that are still there after a while; empty if none."""
    deadline = time.monotonic() + GONE_S
    while True:
        left = [child.pid for child in server.children(recursive=True) if "stub" in child.name()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def verdict(cycles: list[dict[str, Any]], growth: float) -> dict[str, Any]:
    """What stayed, between the end of the first quarter and the last cycle."""
    early, last = cycles[len(cycles) // 4], cycles[-1]
    grown = round(last["server_mb"] - early["server_mb"], 1)
    failed = sum(one["streams_failed"] for one in cycles)
    clean = not failed and not last["processes_left"] and not last["shared_memory_files"] and grown <= growth
    return {"clean": clean, "streams_failed": failed, "server_grew_mb": grown}


if __name__ == "__main__":
    sys.exit(main())
