"""The target's key/value cache for continuous batching: slots that are filled, read and emptied one by one.

Storage is allocated once, keys and values [S, Hkv, C, D] per layer. A pass concerns some slots (`view`); the others are neither read nor
written, so a sequence that joins or leaves costs the rest nothing. Lengths live on the host, where the scheduler needs them: a pass never
waits for the device to learn its shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspine_export.runtime.device_copy import to_device

COLUMN_STEP = 64  # attended columns are rounded up to it, so that kernels see few shapes, and aligned ones


class SlotCache:
    """Keys and values of S slots; `lengths[s]` counts the committed tokens of slot s. Capacity C includes room for one block.

    Args:
        shape: (S, Hkv, C, D). spare: one more slot, of index S, which belongs to no sequence: a captured pass pads its batch with it.
    """

    def __init__(self, layers: int, shape: tuple[int, int, int, int], like: Tensor, *, spare: bool = False) -> None:
        stored = (shape[0] + spare, *shape[1:])
        self.keys = [like.new_zeros(stored) for _ in range(layers)]
        self.values = [like.new_zeros(stored) for _ in range(layers)]
        self.slots, self.capacity, self.has_spare = shape[0], shape[2], spare
        self.lengths = [0] * self.slots

    @property
    def spare(self) -> int:
        """Index of the spare slot."""
        return self.slots

    def view(self, rows: Sequence[int]) -> SlotView:
        """What one pass over the slots `rows` works on."""
        return SlotView(self, rows)

    def queued_view(self, rows: Sequence[int], index: Tensor, lengths: Tensor, longest: int) -> QueuedView:
        """The same where only the device knows how long the sequences are: index (the rows) and lengths int64 [N], none above `longest`."""
        return QueuedView(self, rows, index, lengths, longest)

    def advance(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Commits the first counts[n] tokens of the pass just made over slot rows[n]."""
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count

    def reset(self, row: int, *, erase: bool = False) -> None:
        """Empties a slot. Old columns are masked until overwritten; `erase` clears them, which values that are not finite need:
        a weight of 0 does not hide them.
        """
        self.lengths[row] = 0
        if erase:
            for cache in (*self.keys, *self.values):
                cache[row].zero_()

    def erase(self) -> None:
        """Empties and clears all slots."""
        self.lengths = [0] * self.slots
        for cache in (*self.keys, *self.values):
            cache.zero_()


class SlotView:
    """Some slots of a `SlotCache` during one pass, with the interface `ragged_cache.ragged_attention` writes through."""

    def __init__(self, cache: SlotCache, rows: Sequence[int]) -> None:
        self._cache, self._rows = cache, list(rows)
        self._device = cache.keys[0].device
        first, count = self._rows[0], len(self._rows)
        # Neighbouring slots are read in place, others are gathered.
        self._range = (first, count) if self._rows == list(range(first, first + count)) else None
        self.index = self._positions = torch.empty(0, dtype=torch.int64)
        self._columns = 0

    @property
    def storage(self) -> SlotCache | None:
        """The cache, where passes over it can be captured."""
        return self._cache if self._cache.has_spare else None

    def reach(self, count: int) -> int:
        """Columns up to the last of `count` more tokens of the longest sequence."""
        return max(self._cache.lengths[row] for row in self._rows) + count

    def next_positions(self, count: int) -> Tensor:
        """Positions of the next `count` tokens of every row, int64 [N, count]. Sets `index`, the rows on the device."""
        starts = [self._cache.lengths[row] for row in self._rows]
        table = np.empty((len(starts), 1 + count), dtype=np.int64)  # slot and positions: one copy to the device
        table[:, 0] = self._rows
        np.add(np.asarray(starts)[:, None], np.arange(count), out=table[:, 1:])
        # Padding behind a short row may run over the end; nobody reads the last column before it is written again.
        np.minimum(table[:, 1:], self._cache.capacity - 1, out=table[:, 1:])
        last = min(max(starts) + count, self._cache.capacity)
        self._columns = min(-(-last // COLUMN_STEP) * COLUMN_STEP, self._cache.capacity)
        uploaded = to_device(torch.from_numpy(table), self._device)
        self.index = uploaded[:, 0]
        return uploaded[:, 1:]

    def begin(self, positions: Tensor) -> Tensor:
        """Announces the pass at `next_positions`; returns its mask, bool [N, 1, T, C']: key position <= own position."""
        self._positions = positions
        column = torch.arange(self._columns, device=self._device)
        return (column <= positions.unsqueeze(-1)).unsqueeze(1)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the pass's keys and values [N, Hkv, T, D] of one layer; returns the first C' columns of the rows' cache."""
        return self._store(self._cache.keys[layer], keys), self._store(self._cache.values[layer], values)

    def _store(self, cache: Tensor, new: Tensor) -> Tensor:
        cache[self.index[:, None], :, self._positions] = new.transpose(1, 2)
        attended = cache[:, :, : self._columns]
        if self._range is not None:
            return attended.narrow(0, *self._range)
        return attended.index_select(0, self.index)


class QueuedView(SlotView):
    """A `SlotView` behind passes that have been queued but not read: lengths are the device's, the host knows an upper bound."""

    def __init__(self, cache: SlotCache, rows: Sequence[int], index: Tensor, lengths: Tensor, longest: int) -> None:
        super().__init__(cache, rows)
        self.index, self._lengths, self._longest = index, lengths, longest

    def reach(self, count: int) -> int:
        return self._longest + count

    def next_positions(self, count: int) -> Tensor:
        capacity = self._cache.capacity
        last = min(self._longest + count, capacity)
        self._columns = min(-(-last // COLUMN_STEP) * COLUMN_STEP, capacity)
        positions = self._lengths[:, None] + torch.arange(count, device=self._device)
        # As in `SlotView`; also a sequence that has ended unseen runs on for a round.
        return positions if self._longest + count <= capacity else positions.clamp_max_(capacity - 1)
