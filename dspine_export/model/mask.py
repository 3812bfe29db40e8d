"""Which key rows a block row may see: committed context, then its own block, both limited by a sliding window."""

from __future__ import annotations

import torch
from torch import Tensor


def block_mask(lengths: Tensor, capacity: int, block_size: int, causal: bool, window: int | None) -> Tensor:
    """Visibility of [context ; block] keys.

    Args:
        lengths: committed tokens n per sequence, int64 [N]; block slot i sits at position n + i.
        capacity: context rows C in the cache; rows at or beyond n are never visible.
        causal: whether slot i is hidden from the slots before it (DSpine) or not (z-lab DFlash).
        window: a key is visible iff query position - key position < window; None means no limit.

    Returns:
        bool [N, 1, B, C + B], True where visible.
    """
    column = torch.arange(capacity, device=lengths.device)
    slot = torch.arange(block_size, device=lengths.device)
    n = lengths[:, None, None]  # [N, 1, 1]
    context = (column < n).expand(-1, block_size, -1)  # [N, B, C]
    block = (
        slot[None, :] <= slot[:, None] if causal else torch.ones_like(slot[None, :] + slot[:, None], dtype=torch.bool)
    )
    if window is not None:
        context = context & (n + slot[:, None] - column < window)
        block = block & (slot[:, None] - slot[None, :] < window)
    # `n >= 0` broadcasts the block part over the batch without naming the batch size.
    return torch.cat((context, block & (n >= 0)), dim=-1).unsqueeze(1)
