"""Naive reference of `gated_messages`: the oracle of its tests."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gated_messages_reference(
    readout: Tensor, gates: Tensor, bias: Tensor, anchor_rows: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """readout [N*B, r], gates [3m, r] (G_r, G_p, M), bias [m], anchor_rows [N, 2m] -> z, receiver gate: float32 [N*B, m]."""
    wide = readout.float()
    feature = wide * (math.sqrt(readout.shape[1]) / wide.norm(dim=-1, keepdim=True).clamp_min(1e-12))
    receiver, predecessor, message = (feature @ gates.float().T).chunk(3, dim=-1)
    m = receiver.shape[1]
    receiver = receiver + bias.float()
    message, predecessor = message.roll(1, 0), predecessor.roll(1, 0)
    slot = torch.arange(readout.shape[0], device=readout.device) % block
    first = (slot == 1)[:, None]
    anchors = anchor_rows.float().repeat_interleave(block, 0)
    message = torch.where(first, anchors[:, :m], message)
    predecessor = torch.where(first, anchors[:, m:], predecessor)
    z = torch.sigmoid(receiver + predecessor) * message
    return torch.where((slot > 0)[:, None], z, 0.0), receiver
