"""Naive reference of `linear`: the oracle of its tests."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_reference(
    x: Tensor, weight: Tensor, *, norm_width: int = 0, squares: Tensor | None = None, eps: float = 0.0, pair: bool = False,
    residual: Tensor | None = None, write: bool = False, block: int = 1,
) -> Tensor:  # fmt: skip
    """x [R, K], weight [N, K] or, paired, [2N, K] -> float32 [R, N]; squares [T, R]: parts of sums over norm_width values."""
    product = x.float() @ weight.float().T
    if squares is not None and not write:
        product = product * torch.rsqrt(squares.sum(0) / norm_width + eps)[:, None]
    if pair:
        gate, up = product.chunk(2, dim=-1)
        product = torch.nn.functional.silu(gate) * up
    if squares is not None and write:
        slot = torch.arange(x.shape[0], device=x.device) % block
        product = product * torch.where(slot > 0, (squares.sum(0) / norm_width).sqrt(), 0.0)[:, None]
    return product if residual is None else product + residual.float()
