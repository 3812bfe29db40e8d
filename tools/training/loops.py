"""Finding the point where a generated text starts to repeat itself.

Small greedy models fall into loops; a drafter predicts a loop perfectly, so loops flatter the acceptance length and waste training.
"""

from __future__ import annotations

import torch
from torch import Tensor

LONGEST_PERIOD = 64  # tokens
SHORTEST_LOOP = 24  # tokens a repetition must span
COPIES = 3  # times the same text must stand in a row


def loop_starts(tokens: Tensor, lengths: Tensor) -> Tensor:
    """First token index of a loop per row, or the row's length when there is none.

    A loop of period p is a stretch where ``token[i] == token[i + p]`` holds for at least ``max((COPIES - 1) * p, SHORTEST_LOOP)``
    consecutive i, so that one text stands ``COPIES`` times in a row (fewer for a short period over a long stretch is impossible).

    Args:
        tokens: [N, T] int, right-padded.
        lengths: [N] int64.

    Returns:
        [N] int64.
    """
    count, width = tokens.shape
    starts = lengths.clone()
    columns = torch.arange(width, device=tokens.device)
    for period in range(1, min(LONGEST_PERIOD, width - 1) + 1):
        equal = tokens[:, period:] == tokens[:, :-period]
        equal &= columns[period:] < lengths[:, None]
        needed = max((COPIES - 1) * period, SHORTEST_LOOP)
        if equal.shape[1] < needed:
            continue
        total = torch.cat((torch.zeros(count, 1, dtype=torch.int32, device=tokens.device), equal.cumsum(1, dtype=torch.int32)), 1)
        hit = (total[:, needed:] - total[:, :-needed]) == needed  # [N, positions where a full stretch begins]
        first = torch.where(hit.any(1), hit.int().argmax(1), lengths)
        starts = torch.minimum(starts, first)
    return starts
