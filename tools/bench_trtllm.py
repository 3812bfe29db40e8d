"""The cost of one draft step behind TensorRT-LLM's hooks, from its context cache to the drafted tokens, in a CUDA graph.

    python -m tools.bench_trtllm --batches 1 8 32 --context 2000 --capacity 4096 --out result.json

Random weights at Qwen3-8B shapes, bfloat16; the cache is laid out as TensorRT-LLM lays it out (by slots, or in pages). The kernels'
executor against the torch model's, which reads the whole cache. The package itself takes no part.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspine_export.model.drafter import Drafter
from dspine_export.trtllm.block_executors import BlockExecutor, TorchBlock
from dspine_export.trtllm.kernel_block import open_kernels
from dspine_export.trtllm.worker_cache import WorkerContext, open_context
from tools.bench_draft import QWEN3_8B, random_drafter
from tools.gpu_timing import capture, replay_us

PAGE = 32


def worker_context(batch: int, capacity: int, *, paged: bool) -> WorkerContext:
    """A filled cache of `batch` + 1 slots; pages are in random order."""
    layers, heads, dim = QWEN3_8B.num_layers, QWEN3_8B.num_kv_heads, QWEN3_8B.head_dim
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    rows = torch.randperm(batch + 1, device="cuda")[:batch]
    if not paged:
        keys, values = (torch.randn(batch + 1, layers, capacity, heads, dim, **options) for _ in range(2))
        return open_context(keys, values, rows, None, None)
    pages = (batch + 1) * capacity // PAGE
    cache = torch.randn(layers, pages, 2, heads, PAGE, dim, **options)
    table = torch.randperm(pages, device="cuda").view(batch + 1, -1).int()
    return open_context(None, None, rows, cache, table)


def step(
    executor: BlockExecutor, drafter: Drafter, context: WorkerContext, anchors: torch.Tensor, lengths: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """What the worker runs per step; the head is asked only where the executor does not bring its own logits."""
    batch, drafted = anchors.shape[0], QWEN3_8B.block_size - 1

    def run() -> torch.Tensor:
        hidden = executor.draft(anchors, context, lengths)
        if executor.own_logits:
            logits = hidden.new_zeros(1).expand(batch, drafted, QWEN3_8B.vocab_size)
        else:
            logits = hidden[:, 1:] @ drafter.lm_head.T
        return executor.refine(logits).argmax(-1)

    return run


@torch.no_grad()
def measure(
    executors: dict[str, BlockExecutor], drafter: Drafter, batch: int, context: int, capacity: int
) -> dict[str, Any]:
    """Microseconds of a replayed step by executor and cache, and how many tokens the two agree on."""
    anchors = torch.randint(0, QWEN3_8B.vocab_size - 1000, (batch,), device="cuda")
    lengths = torch.full((batch,), context, device="cuda")
    row: dict[str, Any] = {"batch": batch, "context": context, "capacity": capacity}
    for paged in (False, True):
        cache, tokens = worker_context(batch, capacity, paged=paged), {}
        for name, executor in executors.items():
            run = step(executor, drafter, cache, anchors, lengths)
            tokens[name] = run()
            row[f"{name}, {'paged' if paged else 'slots'}"] = round(replay_us(capture(run), 7, 5), 1)
        row[f"equal tokens, {'paged' if paged else 'slots'}"] = float(
            (tokens["torch"] == tokens["kernels"]).float().mean()
        )
        del cache
        torch.cuda.empty_cache()
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--capacity", type=int, default=4096, help="columns of the worker's cache, a multiple of 32")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    drafter = random_drafter(QWEN3_8B)
    executors: dict[str, BlockExecutor] = {
        "torch": TorchBlock(drafter),
        "kernels": open_kernels(random_drafter(QWEN3_8B))[1],
    }
    rows = []
    for batch in arguments.batches:
        rows.append(measure(executors, drafter, batch, arguments.context, arguments.capacity))
        print(json.dumps(rows[-1]), flush=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
