"""A vLLM engine in this process, its insides, and timed batches: what the vLLM tools share.

`VLLM_ENABLE_V1_MULTIPROCESSING=0` must be in the environment before vLLM is imported (`one_process` puts it there): the model runner is
then an object of this process.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.turns import start_when_ready

WORDS = (1000, 100000)  # range of random prompt tokens; clear of special ones


def one_process() -> None:
    """Environment that vLLM reads when it is imported."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if importlib.util.find_spec("flashinfer") is None:  # vLLM 0.33 asks for its sampler without looking
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")


def side_by_side(commands: Mapping[str, Sequence[str]], gpus: Sequence[str], folder: Path) -> int:
    """Runs the named commands as subprocesses, one at a time on a device; returns how many failed. Logs are folder/NAME.log."""
    waiting, failed = list(commands), 0
    running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
    while waiting or running:
        for gpu in gpus:
            if gpu not in running and waiting:
                name = waiting.pop(0)
                with (folder / f"{name}.log").open("wb") as log:
                    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
                    process = subprocess.Popen(commands[name], env=environment, stdout=log, stderr=subprocess.STDOUT)
                running[gpu] = (name, process)
        time.sleep(1)
        for gpu, (name, process) in list(running.items()):
            if process.poll() is not None:
                failed += process.returncode != 0
                print(f"{name} on GPU {gpu}: exit code {process.returncode}", flush=True)
                del running[gpu]
    return failed


def together(commands: Mapping[str, Sequence[str]], gpu: str, folder: Path, turns: Path) -> int:
    """Runs the named commands as subprocesses on one device, all at once; they measure by turns, once all are ready that could start."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed, started = 0, False
    for name, command in commands.items():
        # vLLM's caches of compiled code are not made for several that write the same.
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": gpu,
            "VLLM_CACHE_ROOT": str((folder / f"cache_{name}").resolve()),
        }
        with (folder / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    while running:
        time.sleep(1)
        for name, process in list(running.items()):
            if process.poll() is not None:
                failed += process.returncode != 0
                print(f"{name} on GPU {gpu}: exit code {process.returncode}", flush=True)
                del running[name]
        started = started or start_when_ready(turns, list(running))
    return failed


def model_runner(llm: Any) -> Any:
    """vLLM's Model Runner V2 of an engine in this process."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def stop(llm: Any) -> None:
    """Ends an engine, so that another can start in the same process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def set_synthetic_length(runner: Any, length: float) -> None:
    """Changes the synthetic acceptance length of a running engine: its sampler reads the rates from this tensor at every step."""
    import torch
    from vllm.config.speculative import SpeculativeConfig
    from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

    rates = runner.rejection_sampler.synthetic_conditional_rates
    wanted = unconditional_to_conditional_rates(SpeculativeConfig._acceptance_length_to_rates(length, len(rates)))
    rates.copy_(torch.tensor(wanted, dtype=rates.dtype))


def random_prompts(batch: int, length: int, seed: int, vocabulary: int) -> list[dict[str, list[int]]]:
    """The same prompts for the same arguments, whatever is being measured."""
    source = random.Random(seed)
    low, high = (WORDS[0], WORDS[1]) if vocabulary > WORDS[1] else (0, vocabulary)
    return [{"prompt_token_ids": [source.randrange(low, high) for _ in range(length)]} for _ in range(batch)]


@dataclass(frozen=True)
class Timed:
    """One batch. tokens: generated; acceptance_length: committed tokens per target call, None without speculation."""

    seconds: float
    tokens: int
    acceptance_length: float | None
    outputs: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def timed_batch(llm: Any, prompts: list[Any], max_tokens: int, *, stop_at_end: bool = False, seed: int | None = None,
                temperature: float = 0.0) -> Timed:  # fmt: skip
    """Generates for all prompts at once; the time covers prefill and decoding."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=temperature, seed=seed, max_tokens=max_tokens, ignore_eos=not stop_at_end, detokenize=False
    )
    before = draft_counters(llm)
    start = time.perf_counter()
    results = llm.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - start
    outputs = [list(one.outputs[0].token_ids) for one in results]
    after = draft_counters(llm)
    drafts, accepted = (after[key] - before[key] for key in ("drafts", "accepted"))
    return Timed(seconds, sum(map(len, outputs)), 1 + accepted / drafts if drafts else None, outputs)


def draft_graph_us(runner: Any, replays: int = 50) -> dict[int, float]:
    """Microseconds of one replay of the drafter's CUDA graph (context and block), by requests; empty where nothing was captured."""
    import torch

    manager = getattr(runner.speculator, "query_cudagraph_manager", None)
    found: dict[int, float] = {}
    for shape, graph in (manager.graphs if manager is not None else {}).items():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        found[shape.num_reqs] = round(start.elapsed_time(end) * 1000 / replays, 1)
    return dict(sorted(found.items()))


def draft_counters(llm: Any) -> dict[str, float]:
    """vLLM's counters of drafts and accepted tokens so far."""
    names = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted"}
    found = {"drafts": 0.0, "accepted": 0.0}
    for metric in llm.get_metrics():
        if metric.name in names:
            found[names[metric.name]] += metric.value
    return found
