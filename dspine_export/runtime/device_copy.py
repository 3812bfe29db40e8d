"""Small host tensors on their way to the device, without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`. On a GPU the copy is queued from pinned memory, which torch keeps until it has been read."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
