"""Timing on a GPU: CUDA-graph replays between events, medians, measured ceilings."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch


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


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int = 15, inner: int = 10) -> float:
    """Median microseconds of a replay, each sample over `inner` back-to-back replays."""
    for _ in range(3):
        graph.replay()
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1000 / inner)
    return median(samples)


def copy_bandwidth_gb_s(size_bytes: int = 4 << 30) -> float:
    """A device-to-device pass over random data by a kernel (not the copy engine), bytes read plus bytes written."""
    source = torch.randn(size_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    graph = capture(lambda: torch.neg(source, out=target))
    return 2 * size_bytes / replay_us(graph, 5, 3) / 1e3


def gemm_tflop_s(size: int = 8192) -> float:
    """A large bfloat16 matrix product on random data."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    graph = capture(lambda: torch.mm(a, b, out=out))
    return 2 * size**3 / replay_us(graph, 5, 3) / 1e6
