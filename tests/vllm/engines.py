"""vLLM engines in the test's own process, on a GPU with CUDA graphs or on a CPU under the Triton interpreter."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tools.vllm_engine import one_process, stop

ON_GPU = torch.cuda.is_available()


@contextmanager
def engine(target: Path, drafter: Path | None = None, *, drafted: int | None = None, **options: Any) -> Iterator[Any]:
    """An engine in float32 over four request slots; with a drafter it speculates. `drafted`: tokens a round, the block's by default.

    ``speculative`` among the options adds to vLLM's speculative_config.
    """
    one_process()
    if not ON_GPU:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    more = options.pop("speculative", {})
    speculative = None
    if drafter is not None:
        speculative = {"method": "dspine", "model": str(drafter), **more}
        if drafted is not None:
            speculative["num_speculative_tokens"] = drafted
    # A stated cache size: vLLM's own measurement of free memory fails where other processes use the device.
    shared_gpu = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28}
    machine = shared_gpu if ON_GPU else {"block_size": 32, "enforce_eager": True}
    defaults: dict[str, Any] = {
        "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 4, "dtype": "float32",
        "disable_log_stats": False, "speculative_config": speculative,
    }  # fmt: skip
    llm = LLM(str(target), **defaults | machine | options)
    try:
        yield llm
    finally:
        stop(llm)


def generate(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: Any) -> list[list[int]]:
    """Token ids after each prompt; greedy unless told otherwise. A list for ``seed`` gives every prompt its own."""
    from vllm import SamplingParams

    seeds = sampling.pop("seed", None)
    many = seeds if isinstance(seeds, list) else [seeds] * len(prompts)
    parameters = [
        SamplingParams(
            **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, "seed": seed}
            | sampling
        )
        for seed in many
    ]
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(one.outputs[0].token_ids) for one in llm.generate(requests, parameters, use_tqdm=False)]


def counter(llm: Any, name: str) -> float:
    """A counter of vLLM's metrics, ``vllm:`` left out."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")
