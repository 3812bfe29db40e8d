"""Streaming search for NaN and infinity in stored tensors."""

from __future__ import annotations

from dspine_export.checkpoint.safetensors_store import TensorStore, torch_dtype
from dspine_export.errors import CheckpointError


def check_tensor_finite(store: TensorStore, name: str) -> None:
    """Refuse tensor `name` if any element is NaN or infinite, naming the first one; memory stays at one chunk."""
    import torch

    dtype = torch_dtype(store[name])
    if not dtype.is_floating_point:
        return
    seen = 0
    for chunk in store.read_bytes(name):
        values = torch.frombuffer(chunk, dtype=dtype)
        # aminmax propagates NaN, so one vectorised pass answers for all elements.
        low, high = torch.aminmax(values)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            first = int(torch.nonzero(~torch.isfinite(values))[0])
            raise CheckpointError(
                f"Tensor {name} holds a non-finite value",
                where=store[name].path,
                got=f"{values[first].item()} at flat index {seen + first}",
                expected="finite weights",
                fix="training diverged or the file is damaged: use another checkpoint",
            )
        seen += values.numel()
