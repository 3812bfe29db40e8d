"""Muon and AdamW for a whole model in few launches and without host reads, so that a step can be captured in a CUDA graph.

The same updates as ``torch.optim.Muon`` (Nesterov, update scaled to AdamW's root mean square) and ``torch.optim.AdamW``; matrices of one
shape are orthogonalised together. The learning rate is a tensor: a replayed graph reads its current value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
TABLES = ("pair.previous", "pair.following", "model.embed_tokens.weight")
MOMENTUM, DECAY, BETAS, EPSILON = 0.95, 0.01, (0.9, 0.95), 1e-8


def orthogonalise(update: Tensor, dtype: torch.dtype) -> Tensor:
    """Five Newton-Schulz steps in ``dtype`` towards the nearest semi-orthogonal matrices of ``update`` [n, rows, columns]."""
    a, b, c = NEWTON_SCHULZ
    x = update.to(dtype)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class GraphOptimiser:
    """Muon for hidden matrices; AdamW for norms, biases and vocabulary tables (those at half the rate)."""

    def __init__(self, model: nn.Module, peak: float) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        tables = [p for n, p in named if n in TABLES]
        ids = {id(p) for p in tables}
        matrices = [p for _, p in named if p.ndim == 2 and id(p) not in ids]
        self.peak, self.parameters = peak, [p for _, p in named]
        self.groups: list[list[nn.Parameter]] = []
        for size in dict.fromkeys(p.shape for p in matrices):
            self.groups.append([p for p in matrices if p.shape == size])
        self.momenta = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.vectors = [p for _, p in named if p.ndim != 2] + tables
        self.rates = [1.0] * (len(self.vectors) - len(tables)) + [0.5] * len(tables)
        self.first = [torch.zeros_like(p) for p in self.vectors]
        self.second = [torch.zeros_like(p) for p in self.vectors]
        self.count = torch.zeros((), device=self.parameters[0].device)
        self.dtype = torch.bfloat16 if self.count.is_cuda else torch.float32  # bfloat16 is slow on CPUs

    def state(self) -> list[Tensor]:
        """Every tensor that a resumed training needs beside the parameters."""
        return [*self.momenta, *self.first, *self.second, self.count]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], factor: Tensor) -> None:
        """One update from ``gradients`` (in the order of ``parameters``), clipped to norm 1, at ``factor`` times the peak rate."""
        present = [g for g in gradients if g is not None]
        norm = torch.stack(torch._foreach_norm(present)).norm()
        scale = (1.0 / (norm + 1e-6)).clamp_max(1.0)
        by_id = {id(p): g.float() * scale for p, g in zip(self.parameters, gradients, strict=True) if g is not None}
        rate = factor * self.peak
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            self._muon([p for p in group if id(p) in by_id], momentum, by_id, rate)
        self._adamw(by_id, rate)

    def _muon(self, group: list[nn.Parameter], momentum: Tensor, gradients: dict[int, Tensor], rate: Tensor) -> None:
        if not group:  # a part this arm does not use
            return
        gradient = torch.stack([gradients[id(p)] for p in group])
        momentum = momentum[: len(group)]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = orthogonalise(gradient.lerp(momentum, MOMENTUM), self.dtype).float()
        update = update * (-rate * 0.2 * math.sqrt(max(group[0].shape)))
        parameters: list[Tensor] = [*group]
        torch._foreach_mul_(parameters, 1 - rate * DECAY)
        torch._foreach_add_(parameters, update.unbind(0))

    def _adamw(self, gradients: dict[int, Tensor], rate: Tensor) -> None:
        self.count += 1
        corrections = [1 - beta**self.count for beta in BETAS]
        for parameter, share, first, second in zip(self.vectors, self.rates, self.first, self.second, strict=True):
            gradient = gradients.get(id(parameter))
            if gradient is None:
                continue
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            root = (second / corrections[1]).sqrt() + EPSILON
            parameter.sub_(first / corrections[0] / root * (rate * share))
