"""Rotary position embedding, rotate-half over the whole head dimension."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin for absolute positions: angles in float32, stored in the compute dtype. [N, T] -> 2 x [N, 1, T, D]"""
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    # Powers in float64: float32 ones differ in the last bit between libraries, which is 2e-3 radians at position 40960.
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    inverse_frequency = (1.0 / theta**exponent).to(angle_dtype)  # [D/2]
    angles = positions.to(angle_dtype).unsqueeze(-1) * inverse_frequency  # [N, T, D/2]
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotation to queries or keys. x [N, H, T, D]; cos, sin [N, 1, T, D]"""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return x * cos + torch.cat((-second, first), dim=-1) * sin
