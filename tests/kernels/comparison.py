"""Inputs and comparison of the kernels' tests."""

from __future__ import annotations

import torch
from torch import Tensor

from dspine_export.tolerance import TOLERANCES


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Within the published table; NaN (a value never written) fails."""
    bound = TOLERANCES[str(dtype).removeprefix("torch.")]
    got, want = got.double(), want.double()
    assert bool(got.isfinite().all())
    error = (got - want).norm() / want.norm().clamp_min(1e-12)
    assert float(error) <= bound.frobenius, float(error)


def randn(*shape: int, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def poisoned(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=dtype)
