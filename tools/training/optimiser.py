"""Optimisers and the learning-rate schedule.

Hidden matrices take Muon (orthogonalised momentum) or AdamW; norms and the gate bias always take AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn


def learning_rate(step: int, steps: int, warmup: float) -> float:
    """Factor on the peak rate: linear warm-up over the first share ``warmup`` of the run, then a cosine to 0."""
    progress = (step + 1) / steps
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min((progress - warmup) / max(1 - warmup, 1e-9), 1.0)))


def build_optimisers(model: nn.Module, kind: str, peak: float) -> list[torch.optim.Optimizer]:
    """The optimisers of a run; every parameter group carries its peak rate under ``peak``.

    Muon's update is scaled to AdamW's root mean square, so one ``peak`` suits both.
    """
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    optimisers: list[torch.optim.Optimizer] = [torch.optim.AdamW(vectors, lr=peak, betas=(0.9, 0.95), weight_decay=0.0)]
    if kind == "muon":
        optimisers.append(torch.optim.Muon(matrices, lr=peak, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    else:
        optimisers.append(torch.optim.AdamW(matrices, lr=peak, betas=(0.9, 0.95), weight_decay=0.01, fused=True))
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["peak"] = peak
    return optimisers


def advance(optimisers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """One step of every optimiser at ``factor`` times its peak rate; clears the gradients."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group["peak"] * factor
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
