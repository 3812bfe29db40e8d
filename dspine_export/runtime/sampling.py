"""The target's sampling distribution: temperature and nucleus (top-p)."""

from __future__ import annotations

import torch
from torch import Tensor


def nucleus(logits: Tensor, temperature: Tensor, top_p: float | Tensor) -> Tensor:
    """Logits with -inf outside the smallest set of tokens whose probability reaches `top_p`, at temperature > 0.

    Rejection sampling is exact for any target distribution, so cutting the logits before it keeps speculative output distributed as
    the target's own nucleus samples. logits float32 [N, ..., V], temperature float32 [N], top_p a number or float32 [N], where 1 cuts
    nothing; the most likely token always stays.
    """
    if isinstance(top_p, float | int) and top_p >= 1.0:
        return logits
    rows = (-1, *[1] * (logits.ndim - 1))
    divisor = torch.where(temperature > 0, temperature, 1.0).view(rows)
    values, order = (logits / divisor).softmax(-1).sort(dim=-1, descending=True, stable=True)
    limit = top_p
    if isinstance(top_p, Tensor):  # rounding lets the mass before a token reach 1
        limit = torch.where(top_p >= 1, torch.inf, top_p).view(rows)
    outside = values.cumsum(-1) - values >= limit  # mass before the token already suffices
    outside[..., 0] = False
    return logits.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), float("-inf"))


def sample(logits: Tensor, temperature: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token per row, int64 [N]: the argmax where the temperature is 0. logits float32 [N, V], temperature float32 [N]"""
    greedy = logits.argmax(-1)
    if not bool((temperature > 0).any()):
        return greedy
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    drawn = torch.multinomial((logits / divisor).softmax(-1), 1, generator=generator).squeeze(1)
    return torch.where(temperature > 0, drawn, greedy)
