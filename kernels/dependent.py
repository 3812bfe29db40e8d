"""Programmatic dependent launch: what lets a kernel start under the tail of the one before it.

Every kernel that is launched dependently waits for its predecessor before it touches anything that the predecessor wrote, and lets its
successor start either at once or before its own epilogue. Its predecessor waited too, so when the wait returns everything earlier is
complete. What is read before the wait must be older: at that time the kernel before the predecessor is complete only if the predecessor
starts its successor late, or not at all.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

NOT, EARLY, LATE = 0, 1, 2  # when the successor may start; not dependent at all where that measured best
STARTS: dict[str, int] = {
    **dict.fromkeys(("_attend", "_gate", "_merge", "_round_rows"), EARLY),
    **dict.fromkeys(("_messages", "_silu_mul"), NOT),
}
DEFAULT_START = LATE


@triton.jit
def start_early(PDL: tl.constexpr):
    """Lets the next kernel in the stream occupy what this one leaves free, if it is one that does so at once."""
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def start_next(PDL: tl.constexpr):
    """The same for one that does so before its epilogue."""
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_previous(PDL: tl.constexpr):
    """Returns when the previous kernel is complete and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@functools.cache
def is_recent(device: torch.device) -> bool:
    """Whether it is an NVIDIA GPU of compute capability 9.0 or later."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def dependent(kernel: object, tensor: Tensor, start: int | None = None) -> dict[str, int]:
    """Launch options of a kernel with a PDL parameter: dependent where it is compiled (not interpreted) for capability 9 and later.

    start: None: as measured for the kernel.
    """
    if not isinstance(kernel, JITFunction) or not is_recent(tensor.device):
        return {"PDL": NOT}
    if start is None:
        start = STARTS.get(kernel.fn.__name__, DEFAULT_START)
    return {"PDL": start, "launch_pdl": start != NOT}
