"""Kernels run on the GPU where there is one, else under Triton's interpreter, which must be chosen before the first kernel is imported."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The interpreter computes in numpy, which knows no bfloat16 products."""
    return (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
