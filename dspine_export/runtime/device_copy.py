"""Small tensors on their way between host and device, without waiting for more than they need."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`. On a GPU the copy is queued from pinned memory, which torch keeps until it has been read."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


class Arriving:
    """A queued copy to the host."""

    def __init__(self, values: Tensor) -> None:
        self._host, self._arrived = values, None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    _arrived: torch.cuda.Event | None

    @property
    def here(self) -> bool:
        """Whether nobody would have to wait for it."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> Tensor:
        """The values on the host; does not wait for what was queued after them."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host
