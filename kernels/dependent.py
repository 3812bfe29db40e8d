"""Programmatic dependent launch and prefetch into the L2 cache: what lets a kernel start under the tail of the one before it.

Every kernel that is launched dependently lets its successor start at once and waits for its predecessor before it touches anything that
the predecessor wrote. Its predecessor did the same, so when the wait returns everything earlier is complete. Weights are nobody's output
inside a pass: they may be prefetched before the wait.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction


@triton.jit
def start_next(PDL: tl.constexpr):
    """Lets the next kernel in the stream occupy what this one leaves free."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_previous(PDL: tl.constexpr):
    """Returns when the previous kernel is complete and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, size_bytes):
    """Asks the L2 cache for size_bytes (a multiple of 16) from each of the 16-byte aligned pointers. Nothing waits for it."""
    tl.inline_asm_elementwise(
        "{ cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r",
        [pointers.to(tl.int64), size_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_share(ahead, share_bytes, program, PDL: tl.constexpr):
    """One program's share of a tensor (bytes)."""
    if PDL:  # noqa: SIM102 (one is decided when compiling)
        if share_bytes > 0:
            piece = share_bytes // 128
            prefetch(ahead + program.to(tl.int64) * share_bytes + tl.arange(0, 128) * piece, piece)


@functools.cache
def _supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


def dependent(kernel: object, tensor: Tensor) -> dict[str, bool]:
    """Launch options of a kernel with a PDL parameter: dependent where it is compiled (not interpreted) for capability 9 and later."""
    if isinstance(kernel, JITFunction) and _supported(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def share_bytes(ahead: Tensor | None, programs: int) -> int:
    """What each of a launch's programs asks the L2 cache for: equal shares of the tensor, in 128 pieces that are multiples of 16."""
    return 0 if ahead is None else ahead.numel() * ahead.element_size() // programs // 2048 * 2048
