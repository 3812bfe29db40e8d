"""A pass over static buffers that runs as one CUDA graph, and its inputs' way to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 2  # compile kernels and create library handles, which a capture must not do


class CapturedPass:
    """Runs `launch`, captured at the first run where the device is a GPU.

    `launch` must read and write fixed buffers only, and be harmless on what they hold at construction. `pool`: a handle of memory that
    passes share which never run at once and leave nothing in it.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device, pool: Any = None) -> None:
        self._launch = launch
        self._graph = _capture(launch, device, pool) if device.type == "cuda" else None

    def run(self) -> None:
        """Queues the pass on the current stream."""
        if self._graph is None:
            self._launch()
        else:
            self._graph.replay()


def _capture(launch: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            launch()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads (a server's, another model's) may use the GPU meanwhile.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph


def upload(buffer: Tensor, values: Tensor) -> None:
    """buffer <- values without waiting for the device. Host values go through pinned memory, which torch keeps until they are read."""
    if buffer.device.type == "cuda" and values.device.type == "cpu":
        values = values.to(buffer.dtype).pin_memory()
    buffer.copy_(values, non_blocking=True)


def upload_list(buffer: Tensor, values: Sequence[int]) -> None:
    """The same from integers."""
    upload(buffer, torch.tensor(values, dtype=torch.int64))
