"""Timing on a GPU: CUDA-graph replays between events, medians, measured ceilings."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

SAMPLES = 11
BUDGET_US = 60_000  # device time spent on one number: long passes are repeated less often


def capture(work: Callable[[], object], warmup: int = 3) -> torch.cuda.CUDAGraph:
    """Warms up on a side stream (compilation, handles) and captures one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, samples: int = SAMPLES, inner: int | None = None) -> float:
    """Median microseconds of a replay; each sample covers `inner` back-to-back replays, None: as many as `BUDGET_US` allows."""
    return call_us(graph.replay, samples, inner)


def call_us(work: Callable[[], object], samples: int = SAMPLES, inner: int | None = None) -> float:
    """The same for any work that queues device work and does not wait for it."""
    _interval_us(work, 2)
    if inner is None:
        inner = int(min(10, max(1, BUDGET_US / samples / max(_interval_us(work, 1), 1.0))))
    return median(_interval_us(work, inner) for _ in range(samples))


def _interval_us(work: Callable[[], object], count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / count


def copy_bandwidth_gb_s(size_bytes: int = 4 << 30) -> float:
    """A device-to-device pass over random data by a kernel (not the copy engine), bytes read plus bytes written."""
    source = torch.randn(size_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * size_bytes / replay_us(capture(lambda: torch.neg(source, out=target))) / 1e3


def gemm_tflop_s(size: int = 8192) -> float:
    """A large bfloat16 matrix product on random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / replay_us(capture(lambda: torch.mm(a, b, out=out))) / 1e6
