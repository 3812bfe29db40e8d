"""Draft blocks cut from a batch: where they stand, what they must predict, and how much each slot counts.

Symbols: N sequences, M blocks per sequence, B rows of a block, T padded length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.training.data import Batch


@dataclass(frozen=True)
class Blocks:
    """M blocks of every sequence; slot 0 is the anchor."""

    anchors: Tensor  # [N, M] position of the anchor = context length of the block
    positions: Tensor  # [N, M, B]
    ids: Tensor  # [N, M, B] true tokens (position clamped into the sequence)
    valid: Tensor  # bool [N, M, B] the position lies inside the sequence


def sample_anchors(batch: Batch, count: int, generator: torch.Generator | None = None) -> Tensor:
    """[N, M] anchor positions, stratified over every answer: the answer is cut in M equal parts and each part gives one anchor.

    An anchor is any answer token that has a successor: the first answer token is the first anchor of a real decode.
    """
    span = (batch.lengths - 1 - batch.prompts).clamp_min(1)[:, None]  # answer tokens with a successor
    shape = (len(batch.prompts), count)
    jitter = torch.rand(shape, device=batch.ids.device, generator=generator)
    fraction = (torch.arange(count, device=batch.ids.device) + jitter) / count
    return batch.prompts[:, None] + (fraction * span).long().clamp_max(span - 1)


def cut_blocks(batch: Batch, anchors: Tensor, size: int) -> Blocks:
    """Blocks of ``size`` rows that start at ``anchors`` [N, M]."""
    positions = anchors[..., None] + torch.arange(size, device=anchors.device)
    valid = positions < batch.lengths[:, None, None]
    inside = positions.clamp_max(batch.ids.shape[1] - 1)
    ids = batch.ids.gather(1, inside.flatten(1)).view_as(positions)
    return Blocks(anchors, positions, ids, valid)


def slot_weights(valid: Tensor, decay: float) -> Tensor:
    """fp32 weights [N, M, B-1] of the predicting slots i = 1 .. B-1: exp(-(i-1)/decay), 0 outside the sequence."""
    slots = torch.arange(valid.shape[-1] - 1, device=valid.device)
    return valid[..., 1:] * torch.exp(-slots / decay)


def rows_before(hidden: Tensor, positions: Tensor) -> Tensor:
    """``hidden`` [N, T, d] at the position before every predicting slot, [N, M, B-1, d]: there the target predicts that slot's token."""
    before = (positions[..., 1:] - 1).clamp_max(hidden.shape[1] - 1)
    flat = before.flatten(1)[..., None].expand(-1, -1, hidden.shape[-1])
    return hidden.gather(1, flat).view(*before.shape, -1)
