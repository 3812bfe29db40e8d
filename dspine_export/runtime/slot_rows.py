"""Which slots of a cache a call is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dspine_export.errors import UsageError

Rows: TypeAlias = Sequence[int] | Tensor | None


def row_list(rows: Rows, slots: int) -> list[int] | None:
    """`rows` as integers on the host; None for all slots in their order.

    Raises:
        UsageError: no row, a row twice, or one outside 0 .. slots - 1.
    """
    if rows is None:
        return None
    chosen = [int(row) for row in (rows.tolist() if isinstance(rows, Tensor) else rows)]
    if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0 or max(chosen) >= slots:
        raise UsageError(
            "These are not rows of the state", where="rows", got=chosen, expected=f"distinct, in 0 .. {slots - 1}"
        )
    return None if chosen == list(range(slots)) else chosen


def row_index(rows: Rows, slots: int, device: torch.device) -> Tensor | None:
    """The same as an index, int64 [N] on `device`. Raises as `row_list`."""
    chosen = row_list(rows, slots)
    return None if chosen is None else torch.tensor(chosen, dtype=torch.int64, device=device)
