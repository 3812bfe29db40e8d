"""Load on the serving engine in a bare process: what the Triton backend runs, without a server around it.

    python -m tools.serve_engine recipes/example/drafter --target-model TARGET --device cuda --out engine.json
    python -m tools.serve_engine recipes/example/drafter --target-model TARGET --soak 8 --concurrency 64 --out soak.json

Throughput, time to first token, inter-token latency and acceptance per concurrency, with DSpine and without, and for rounds over the
full batch:

* round_ms: from the end of the round before to its own, on the device's clock; rounds that follow a prompt's pass are left out.
* serving_share: the part of it in which neither model runs: other kernels, and every moment the device has nothing to do.
* host_us_per_round: what the loop's thread does for a round, the wait for the device left out. Hidden as long as it is the shorter one:
  rounds_waited_for is the part of the rounds that the loop had to wait for, and behind which the next one was therefore queued in time.

`--compare` compares every greedy stream with what the target writes alone, token for token, near-ties counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dspine_export.runtime.serving.admission import Limits
from dspine_export.runtime.serving.engine import Engine, EngineSettings
from dspine_export.runtime.serving.open_engine import PairSource, open_engine
from dspine_export.runtime.serving.request import Request
from tools.serve_load import add_load_options, finish, provenance, read_prompts
from tools.serving.clients import Sample
from tools.serving.engine_load import run_load
from tools.serving.figures import summarise

MEMORY_PERIOD_S = 5.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MODEL_TIME = "draft, verification and append passes; on CUDA between events around each call, on the device's clock"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", type=Path, help="a bundle or a drafter checkpoint")
    add("--target-model", type=Path, required=True)
    add("--executor", default="auto")
    add("--device", default="cpu")
    add("--dtype", default="auto")
    add("--slots", type=int, default=64)
    add("--max-seq-len", type=int, default=1024)
    add("--chunk-tokens", type=int, default=512)
    add("--threads", type=int, help="CPU threads of the loop's torch")
    add("--in-step", action="store_true", help="read every round before the next one is queued")
    add_load_options(add, prompts=64, max_tokens=128)
    add("--compare", action="store_true", help="compare with the target's own greedy output")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run, write the record, and fail if a request did or a stream differs."""
    options = parse_arguments(argv)
    prompts = read_prompts(options.prompts, options.prompt_count)
    started = time.perf_counter()
    engine = start(options)
    record = provenance() | {
        "source": options.source.name,
        "executor": getattr(engine.models.executor, "name", None),
        "device": device_name(options.device),
        "dtype": str(engine.models.target.embed_tokens.dtype).removeprefix("torch."),
        "slots": options.slots,
        "max_tokens": options.max_tokens,
        "rounds_queued_ahead": engine.models.computes_ahead and not options.in_step,
        "model_time": MODEL_TIME,
        "start_seconds": round(time.perf_counter() - started, 1),
    }
    record["command"] = record["command"].replace("tools.serve_load", "tools.serve_engine")
    samples = soak(options, engine, prompts, record) if options.soak else levels(options, engine, prompts, record)
    engine.close(10)
    if options.compare:
        record["greedy"] = compare(options, engine, prompts, samples)
    return finish(options, record, samples)


def start(options: argparse.Namespace) -> Engine:
    """The engine, warm."""
    pair = PairSource(
        options.source, options.target_model, executor=options.executor, device=options.device, dtype=options.dtype
    )
    limits = Limits(max_seq_len=options.max_seq_len)
    settings = EngineSettings(
        options.slots,
        chunk_tokens=options.chunk_tokens,
        limits=limits,
        threads=options.threads,
        ahead=not options.in_step,
    )
    engine = open_engine(pair, settings)
    engine.start()
    return engine


def levels(options: argparse.Namespace, engine: Engine, prompts: list[str], record: dict[str, Any]) -> list[Sample]:
    """A fixed number of requests per concurrency and number of drafted tokens."""
    record["runs"] = []
    samples: list[Sample] = []
    for level in options.concurrency:
        for drafts in options.draft_tokens:
            run, found = measure(options, engine, prompts, level, drafts)
            record["runs"].append(run)
            samples += found
            shown = (
                "concurrency",
                "draft_tokens",
                "tokens_per_second",
                "acceptance_length",
                "round_ms",
                "serving_share",
            )
            print(json.dumps({key: run[key] for key in shown}), flush=True)
    return samples


def measure(
    options: argparse.Namespace, engine: Engine, prompts: list[str], level: int, drafts: int
) -> tuple[dict[str, Any], list[Sample]]:
    """One run, with the loop's times for it alone."""
    total = level * options.requests_per_client
    engine.reset_counters()
    found, wall = run_load(engine, _requests(options, prompts, drafts), level, lambda number: number < total)
    counts = engine.snapshot()
    run = {"concurrency": level, "draft_tokens": drafts if drafts >= 0 else "all", **summarise(found, wall)}
    run["model_seconds"] = {name: round(value, 3) for name, value in counts["model_seconds"].items()}
    run["serving_seconds"] = round(counts["serving_seconds"], 3)
    return run | round_figures(counts["batches"].get(level, {})), found


def round_figures(times: dict[str, float]) -> dict[str, Any]:
    """What a round over the full batch takes, and what of it is not the models'."""
    rounds, turns = times.get("rounds", 0), times.get("turns", 0)
    return {
        "rounds_at_full_batch": rounds,
        "round_ms": round(1e3 * times["seconds"] / rounds, 3) if rounds else None,
        "serving_share": round(times["serving_share"], 4) if rounds else None,
        "host_us_per_round": round(1e6 * times["host_seconds"] / turns) if turns else None,
        "rounds_waited_for": round(times["waits"] / turns, 4) if turns else None,
    }


def soak(options: argparse.Namespace, engine: Engine, prompts: list[str], record: dict[str, Any]) -> list[Sample]:
    """One run of a fixed time, with this process's memory."""
    level, end = options.concurrency[0], time.monotonic() + 60 * options.soak
    trace, stop = [memory_mb(options.device)], threading.Event()

    def sample_memory() -> None:
        while not stop.wait(MEMORY_PERIOD_S):
            trace.append(memory_mb(options.device))

    sampler = threading.Thread(target=sample_memory, daemon=True)
    sampler.start()
    requests = _requests(options, prompts, options.draft_tokens[0])
    found, wall = run_load(engine, requests, level, lambda _number: time.monotonic() < end)
    stop.set()
    sampler.join()
    late = [host for host, _ in trace[len(trace) // 2 :]]
    mean = sum(late) / len(late)
    record["soak"] = {"minutes": options.soak, "concurrency": level, **summarise(found, wall)}
    record["memory"] = {
        "host_and_device_mb": trace,
        "second_half_mean_mb": round(mean, 1),
        "second_half_spread": round(max(abs(value - mean) for value in late) / mean, 5),
    }
    record["engine"] = engine.snapshot()
    return found


def compare(options: argparse.Namespace, engine: Engine, prompts: list[str], samples: list[Sample]) -> dict[str, Any]:
    """Every stream against the target's own greedy output: one reference per prompt, one comparison per different output."""
    from dspine_export.runtime.generate import generate_plain
    from dspine_export.runtime.lossless import compare_greedy
    from dspine_export.runtime.prompts import encode_prompt, load_tokenizer

    target, tokenizer = engine.models.target, load_tokenizer(options.target_model)
    result: dict[str, Any] = {"streams": 0, "equal": 0, "with_near_ties": 0, "different": 0, "differences": []}
    for number, prompt in enumerate(prompts):
        outputs = [tuple(sample.tokens) for sample in samples if sample.prompt == number and sample.error is None]
        if not outputs:
            continue
        ids = encode_prompt(tokenizer, prompt)
        reference = generate_plain(target, ids, max_new_tokens=options.max_tokens).token_ids
        for output in set(outputs):
            found = compare_greedy(target, ids, output, max_new_tokens=options.max_tokens, reference=reference)
            kind = "different" if not found.equal else "with_near_ties" if found.near_ties else "equal"
            result[kind] += outputs.count(output)
            if not found.equal:
                result["differences"].append({"prompt": number, "at": found.first_difference, "lead": found.lead})
        result["streams"] += len(outputs)
    return result


def memory_mb(device: str) -> tuple[float, float]:
    """Resident memory of this process, and torch's on the device."""
    import torch

    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    allocated = torch.cuda.memory_allocated() if device.startswith("cuda") else 0
    return round(resident / 1e6, 1), round(allocated / 1e6, 1)


def device_name(device: str) -> str:
    """What the figures were measured on."""
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def _requests(options: argparse.Namespace, prompts: list[str], drafts: int) -> list[Request]:
    count = drafts if drafts >= 0 else None
    return [
        Request(text=prompt, chat=True, max_tokens=options.max_tokens, num_draft_tokens=count) for prompt in prompts
    ]


if __name__ == "__main__":
    sys.exit(main())
