"""Small tensors on their way between host and device, without waiting for more than they need."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`. On a GPU the copy is queued from pinned memory, which torch keeps until it has been read."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def to_host(values: Tensor) -> Callable[[], Tensor]:
    """Queues the copy of `values`; the function returned waits for it, but not for what was queued afterwards."""
    if values.device.type != "cuda":
        return lambda: values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return host

    return wait
