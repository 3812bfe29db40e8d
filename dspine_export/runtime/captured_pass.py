"""A pass over static buffers that runs as one CUDA graph, and its inputs' way to the device."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

WARM_UPS = 2  # compile kernels and create library handles, which a capture must not do


class CapturedPass:
    """Runs `launch`, captured at the first run where the device is a GPU.

    `launch` must read and write fixed buffers only, and be harmless on what they hold at construction. `pool`: a handle of memory that
    passes share which never run at once and leave nothing in it; whoever holds it must let go of it with its last graph.

    Attributes:
        run: queues the pass on the current stream. Of a captured pass only the graph is kept, whoever made it keeps its buffers.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device, pool: Any = None) -> None:
        self.run: Callable[[], None] = _capture(launch, device, pool).replay if device.type == "cuda" else launch


def _capture(launch: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    current, stream = torch.cuda.current_stream(device), _side_stream(device, threading.get_ident())
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            launch()
    current.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(current),  # a capture that fails leaves its own stream behind
        # Other threads (a server's, another model's) may use the GPU meanwhile.
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        launch()
    return graph


@functools.cache
def _side_stream(device: torch.device, _thread: int) -> torch.cuda.Stream:
    """One for all captures of a thread: what warm-ups free can be had again on the same stream only, library workspaces included."""
    return torch.cuda.Stream(device)


def upload(buffer: Tensor, values: Tensor) -> None:
    """buffer <- values without waiting for the device. Host values go through pinned memory, which torch keeps until they are read."""
    if buffer.device.type == "cuda" and values.device.type == "cpu":
        values = values.to(buffer.dtype).pin_memory()
    buffer.copy_(values, non_blocking=True)


def upload_list(buffer: Tensor, values: Sequence[int]) -> None:
    """The same from integers."""
    upload(buffer, torch.tensor(values, dtype=torch.int64))
