"""What vLLM's linear modules hold, as the kernels read it: a bfloat16 matrix, or float8 values with one scale a matrix or a row.

vLLM makes the latter of a plain checkpoint while it loads (its ``fp8_per_channel``, which is what a drafter's ``fp8`` means here, and
``fp8_per_tensor``) and keeps them transposed; the unrounded ones are gone then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspine_export.runtime.float8 import NARROW

PLAIN = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
ROUNDED = ("Fp8PerTensorOnlineLinearMethod", "Fp8PtpcOnlineLinearMethod")


def is_rounded(module: Any) -> bool:
    """Whether a module that `obstacle` has nothing against holds float8 values."""
    return module.weight.dtype == NARROW


def matrix(module: Any) -> Tensor:
    """[N, K], a view of what the module holds."""
    return module.weight.t() if is_rounded(module) else module.weight


def row_scales(module: Any) -> Tensor:
    """float32 [N] of a rounded module: a view where it has one a row, a copy where it has one."""
    scale, rows = module.weight_scale.reshape(-1), module.weight.shape[1]
    return scale if len(scale) == rows else scale.expand(rows).contiguous()


def obstacle(module: Any, width: int) -> str | None:
    """Why the kernels cannot multiply with a module of `width` inputs; None: they can."""
    weight, kind = getattr(module, "weight", None), type(module).__name__
    method = type(getattr(module, "quant_method", None)).__name__
    if getattr(module, "bias", None) is not None:
        return f"{kind} with a bias"
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return f"{kind} without a matrix, quantised by {method}"
    if weight.dtype == NARROW:
        return _against_rounded(module, width, kind, method)
    if weight.dtype != torch.bfloat16 or method not in PLAIN:
        return f"{kind} of {weight.dtype}, quantised by {method}"
    return None if _stored(weight, width) else f"{kind} of {list(weight.shape)}, stored otherwise"


def _against_rounded(module: Any, width: int, kind: str, method: str) -> str | None:
    weight, scale = module.weight, getattr(module, "weight_scale", None)
    if getattr(module, "input_scale", None) is not None:
        return f"{kind} with static scales of activations"
    if getattr(module, "weight_block_size", None) is not None:
        return f"{kind} with scales of blocks"
    if method not in ROUNDED:
        return f"{kind} in float8, quantised by {method}"
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() not in (1, weight.shape[1]):
        return f"{kind} in float8 with neither one float32 scale nor one a row"
    if not _stored(weight.t(), width) or weight.shape[1] % 16:
        return f"{kind} in float8 of {list(weight.shape)}, stored otherwise"
    return None


def _stored(weight: Tensor, width: int) -> bool:
    return weight.shape[1] == width and width % 16 == 0 and weight.is_contiguous()
