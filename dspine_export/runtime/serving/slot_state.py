"""What a round must know of its sequences, kept on the device: it can be queued before the host has read the round before it.

The host writes a slot's entry when a stream comes to it, every round writes it on. Symbols: N rows of a pass, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspine_export.runtime.device_copy import to_device
from dspine_export.runtime.serving.stream import Stream


@dataclass(frozen=True)
class Known:
    """int64 [N] on the device: the rows' slots, most tokens to draft, anchors, committed tokens, tokens to come behind the anchor."""

    index: Tensor
    most: Tensor
    anchors: Tensor
    lengths: Tensor
    remaining: Tensor


class SlotState:
    """Anchors, lengths and remaining tokens of S slots."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._table = torch.zeros(3, slots, dtype=torch.int64, device=device)
        self._owners: list[Stream | None] = [None] * slots
        self._rows: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self._uploaded: tuple[Tensor, ...] = ()

    def forget(self, slot: int) -> None:
        """The entry is void: the host knows better, or the sequence has ended."""
        self._owners[slot] = None

    def read(self, streams: Sequence[Stream], most: Sequence[int], lengths: Sequence[int]) -> Known:
        """Entries of these streams, which may draft most[n] tokens; lengths[s] is what the host knows of slot s.

        Nothing is uploaded while the same streams go on.
        """
        self._place([stream for stream in streams if self._owners[stream.slot] is not stream], lengths)
        rows = tuple(stream.slot for stream in streams), tuple(most)
        if rows != self._rows:
            self._uploaded = to_device(torch.tensor(rows, dtype=torch.int64), self._table.device).unbind()
            self._rows = rows
        index, limits = self._uploaded
        return Known(index, limits, *self._table.index_select(1, index).unbind())

    def advance(self, known: Known, following: Tensor, taken: Tensor) -> None:
        """Every row has committed taken[n] tokens, int64 [N], and `following` is its anchor now."""
        after = torch.stack((following, known.lengths + taken, known.remaining - taken))
        self._table.index_copy_(1, known.index, after)

    def _place(self, streams: Sequence[Stream], lengths: Sequence[int]) -> None:
        if not streams:
            return
        entries = [(s.slot, s.anchor, lengths[s.slot], s.sequence.remaining - 1) for s in streams]
        table = to_device(torch.from_numpy(np.array(entries, dtype=np.int64).T.copy()), self._table.device)
        self._table.index_copy_(1, table[0], table[1:])
        for stream in streams:
            self._owners[stream.slot] = stream
