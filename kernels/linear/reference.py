"""Naive reference of `linear`: the oracle of its tests."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
    row_sums: Tensor | None = None,
    block: int = 0,
) -> Tensor:
    """x [M, K], weight [N, K] (2N rows for glu) -> float32 [M, N]. See `linear` for the options."""
    wide = x.float()
    if norm_weight is not None:
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * norm_weight.float()
    out = wide @ weight.float().T
    if glu:
        gate, up = out.chunk(2, dim=-1)
        out = torch.nn.functional.silu(gate) * up
    if row_sums is not None:
        assert residual is not None
        scale = (row_sums / residual.shape[-1]).sqrt()
        slot = torch.arange(x.shape[0], device=x.device) % block
        out = torch.where((slot > 0)[:, None], out * scale[:, None], 0.0)
    return out if residual is None else residual.float() + out
