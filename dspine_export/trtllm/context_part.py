"""The part of a drafter's network that turns committed tokens into context keys and values; blocks are drafted by something else."""

from __future__ import annotations

from torch import Tensor, nn

from dspine_export.checkpoint.load import Checkpoint
from dspine_export.model.drafter_model import DrafterModel
from dspine_export.model.loading import build_model


def context_only(checkpoint: Checkpoint, like: Tensor) -> DrafterModel:
    """That part alone, in ``like``'s dtype and device."""
    model = keep_context_part(build_model(checkpoint))
    return model.to(device=like.device, dtype=like.dtype).eval().requires_grad_(False)


def keep_context_part(model: DrafterModel) -> DrafterModel:
    """Drops, in place, everything but what context features, keys and values need."""
    model.injection = None
    model.transfer_codes = None
    model.add_module("norm", nn.Identity())
    for layer in model.layers:
        layer.add_module("mlp", nn.Identity())
        for name in ("q_proj", "o_proj"):
            layer.get_submodule("self_attn").add_module(name, nn.Identity())
    return model
