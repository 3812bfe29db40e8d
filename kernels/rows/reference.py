"""Naive references of the row kernels: the oracles of their tests."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [R, d] -> float32 [R, d]"""
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """gate_up [R, 2F], gate first -> float32 [R, F]"""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def write_and_norm_reference(
    hidden: Tensor, update: Tensor, weight: Tensor, eps: float, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, update [N*B, d] -> injected and its norm, float32 [N*B, d], and |hidden|^2, float32 [N*B]."""
    wide = hidden.float()
    squares = wide.pow(2).sum(-1)
    slot = torch.arange(hidden.shape[0], device=hidden.device) % block
    scale = torch.where(slot > 0, (squares / hidden.shape[1]).sqrt(), 0.0)
    injected = (wide + scale[:, None] * update.float()).to(hidden.dtype)
    return injected.float(), rms_norm_reference(injected, weight, eps), squares
