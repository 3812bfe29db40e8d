"""What callers pass to a `Drafter`: made into tensors of the right kind, or refused before torch fails over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspine_export.errors import UsageError


def tensor_argument(where: str, value: Any, device: torch.device) -> Tensor:
    """`value` as a real tensor on `device`: numbers and lists of them are fine too."""
    try:
        tensor = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        got = f"{type(value).__name__}: {str(error).splitlines()[0][:200]}"
        raise UsageError("Not a tensor of numbers", where=where, got=got, expected="a tensor") from error
    if tensor.is_complex():
        raise UsageError("Not real numbers", where=where, got=tensor.dtype)
    return tensor


def integer_argument(where: str, value: Any, device: torch.device) -> Tensor:
    """`value` as int64 on `device`; other integer types are widened, fractions and truth values refused."""
    tensor = tensor_argument(where, value, device)
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        raise UsageError(
            "Wrong type of numbers", where=where, got=f"{tensor.dtype} {tensor.tolist()}", expected="integers"
        )
    return tensor.to(torch.int64)


def check_hidden_type(target_hidden: object) -> None:
    """Refuse anything but a dense floating-point tensor that has values."""
    fits = isinstance(target_hidden, Tensor) and target_hidden.layout == torch.strided and not target_hidden.is_meta
    if not fits or not isinstance(target_hidden, Tensor) or not target_hidden.is_floating_point():
        got = target_hidden.dtype if isinstance(target_hidden, Tensor) else type(target_hidden).__name__
        expected = "a dense floating-point tensor"
        raise UsageError("Not hidden states", where="target_hidden", got=got, expected=expected)


def check_finite_rows(target_hidden: Tensor, counts: Tensor) -> None:
    """Refuse NaN and infinity in the rows that count: target_hidden [N, T, A*d], the first counts[n] of each sequence."""
    finite = target_hidden.isfinite().all(-1).to(counts.device)
    used = torch.arange(target_hidden.shape[1], device=counts.device) < counts[:, None]
    if not bool((finite | ~used).all()):
        sequence, row = (~finite & used).nonzero()[0].tolist()
        raise UsageError(
            "Target hidden states are not finite",
            where=f"target_hidden: sequence {sequence}, row {row}",
            fix="the target itself computes NaN or infinity there; rows beyond the context lengths may hold anything",
        )
