"""What a launch needs to know of its device."""

from __future__ import annotations

import functools

import torch

SMALLEST = 99 * 1024  # of the architectures we compile for


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """Most shared memory of one program; without a limit under Triton's interpreter."""
    if device.type != "cuda":
        return 1 << 30
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SMALLEST))


def stages_that_fit(device: torch.device, wanted: int, stage_bytes: int, fixed_bytes: int = 0) -> int:
    """Buffered steps of a pipelined loop: as many as wanted, or as fit beside what is there anyway; at least one."""
    room = shared_memory_bytes(device) - fixed_bytes
    return max(1, min(wanted, room // stage_bytes))
