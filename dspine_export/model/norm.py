"""RMS normalisation and the float32 helpers used where the algorithm demands more than the compute dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORMALISE_EPS = 1e-12


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension with a learned gain; statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def at_least_float32(x: Tensor) -> Tensor:
    """Upcasts half types to float32 and leaves float32 and float64 alone."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def vector_norm(x: Tensor) -> Tensor:
    """|x| over the last dimension, kept, in at least float32. [..., d] -> [..., 1]"""
    return at_least_float32(x).pow(2).sum(-1, keepdim=True).sqrt()


def normalise(x: Tensor) -> Tensor:
    """x / max(|x|, 1e-12) in at least float32. [..., r] -> [..., r]"""
    wide = at_least_float32(x)
    return wide / vector_norm(wide).clamp_min(NORMALISE_EPS)
