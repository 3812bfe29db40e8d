"""The executor's steady state as a host sees it: a draft, a readback of its tokens and an append per round, by the wall clock."""

from __future__ import annotations

import time
from statistics import median

import torch

from dspine_export.model.drafter import Drafter
from dspine_export.runtime.cuda_executor import CudaExecutor

ROUNDS, SAMPLES = 20, 5


@torch.no_grad()
def round_us(drafter: Drafter, batch: int, context: int) -> float:
    """Microseconds of one round; with the passes' own times this is what launching, copying and waiting add."""
    config, block = drafter.config, drafter.config.block_size
    executor = CudaExecutor(drafter)
    state = executor.new_slots(batch, context + (SAMPLES + 1) * ROUNDS * block)
    cache = executor.view()
    cache.keys.normal_()
    cache.values.normal_()
    cache.lengths[1:].fill_(context)  # the spare slot stays empty
    width = config.num_taps * config.hidden_size
    device = cache.lengths.device
    hidden = torch.randn(batch, block, width, device=device, dtype=drafter.embed_tokens.dtype)
    heat, uniforms = torch.zeros(batch, device=device), torch.zeros(batch, block - 1, device=device)
    anchors = torch.zeros(batch, dtype=torch.int64, device=device)
    counts = torch.full((batch,), min(5, block))

    def rounds() -> float:
        _wait(device)
        started = time.perf_counter()
        for _ in range(ROUNDS):
            executor.draft_from(state, anchors, heat, uniforms).tokens.cpu()
            executor.append_context(state, hidden, counts)
        _wait(device)
        return (time.perf_counter() - started) * 1e6 / ROUNDS

    rounds()  # captures
    return median(rounds() for _ in range(SAMPLES))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
