"""Uniform numbers that depend on a request's seed and on where in its draft they are used, and on nothing else.

Counter-based, so a batch of any composition draws the same numbers for a request, and integer tensor operations only, so the draw can be
recorded in a CUDA graph. The mixing function is SplitMix64's (Steele et al. 2014).
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SALT = 0x445370696E65  # a stream of its own beside the server's, which are keyed by the same seeds
_BITS = 24  # as many as a float32 in [0, 1) resolves evenly


def request_uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Draws for the slots of a block.

    Args:
        seeds: int64 [N], one per request.
        positions: int64 [N, T], the drafted tokens' positions.

    Returns:
        float32 [N, T] in [0, 1). A position drafted again from another slot draws another number.
    """
    slot = torch.arange(positions.shape[1], device=positions.device)
    stream = _mix(seeds ^ _SALT).unsqueeze(-1)  # [N, 1]
    counter = positions * 4096 + slot + 1
    bits = _mix(stream + counter * _signed(_GOLDEN))
    return (_shift(bits, 64 - _BITS)).to(torch.float32) * 2.0**-_BITS


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 30)) * _signed(_FIRST)
    state = (state ^ _shift(state, 27)) * _signed(_SECOND)
    return state ^ _shift(state, 31)


def _shift(state: Tensor, count: int) -> Tensor:
    """Logical shift to the right; torch's own carries the sign along."""
    return (state >> count) & ((1 << (64 - count)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant
