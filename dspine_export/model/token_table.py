"""The folded token table: M sqrt(r) c_v and G_p sqrt(r) c_v depend on the token alone, so one table replaces codes and two products."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK_ROWS = 16384


def fold_token_table(
    codes: Tensor, message: Tensor, predecessor_gate: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """[M p_v ; G_p p_v] of every token v, with p_v = sqrt(r) c_v; products in float32.

    Args:
        codes: transfer codes [V, r], any floating-point type. message, predecessor_gate: [m, r].
        dtype: of the result; the weights' by default.

    Returns:
        [V, 2m] on the weights' device; the codes are moved there in chunks of rows.
    """
    weight = torch.cat((message, predecessor_gate)).float() * math.sqrt(codes.shape[1])
    table = torch.empty(codes.shape[0], weight.shape[0], dtype=dtype or message.dtype, device=message.device)
    for start in range(0, codes.shape[0], CHUNK_ROWS):
        rows = codes[start : start + CHUNK_ROWS].to(weight.device, torch.float32)
        table[start : start + CHUNK_ROWS] = rows @ weight.T
    return table
