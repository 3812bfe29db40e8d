"""The context caches of all sequences of one executor, in one pair of tensors, and who owns which slot.

Captured graphs hold the addresses of these tensors, so they are shared by every state and replaced only when they must grow. Slot 0 is
never handed out: it stays empty, and the padding of a batch points at it.

The host must not ask the device for lengths while tokens are generated. It keeps an upper bound of each slot's length instead, exact
where the caller's counts were on the host; only when a bound passes the capacity are the true lengths read.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import DependencyError
from dspine_export.runtime.context_cache import rounded

SPARE = 0


class Slot:
    """The right to one slot; it returns to the pool when nobody holds it any more."""

    def __init__(self, index: int) -> None:
        self.index = index


class SlotPool:
    """Attributes:
    keys, values: [S, L, Hkv, C, D]. lengths: int64 [S], committed tokens.
    generation: rises whenever the tensors move; graphs captured before are void.
    """

    def __init__(self, config: DrafterConfig, like: Tensor) -> None:
        self._config, self._like = config, like
        self._free: list[int] = []
        self._bounds: list[int] = [0]
        self.generation = 0
        self.keys, self.values = self._caches(1, rounded(0, None))
        self.lengths = torch.zeros(1, dtype=torch.int64, device=like.device)

    @property
    def slots(self) -> int:
        return len(self._bounds)

    @property
    def capacity(self) -> int:
        return int(self.keys.shape[3])

    def take(self, count: int, columns: int) -> list[Slot]:
        """`count` empty slots with room for `columns` tokens each."""
        missing = max(0, count - len(self._free))
        if missing or columns > self.capacity:
            self._resize(self.slots + missing, max(self.capacity, rounded(columns, None)))
        indices = [self._free.pop() for _ in range(count)]
        self.lengths[indices] = 0
        taken = [Slot(index) for index in indices]
        for slot in taken:
            self._bounds[slot.index] = 0
            weakref.finalize(slot, self._free.append, slot.index).atexit = False
        return taken

    def advance(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Makes room for counts[n] more tokens, at most, in slots[n]."""
        if any(self._bounds[slot] + count > self.capacity for slot, count in zip(slots, counts, strict=True)):
            self._bounds = self.lengths.tolist()  # the one place that waits for the device, rare
        for slot, count in zip(slots, counts, strict=True):
            self._bounds[slot] += count
        longest = max(self._bounds[slot] for slot in slots)
        if longest > self.capacity:
            self._resize(self.slots, rounded(max(longest, self.capacity * 3 // 2), None))

    def bound(self, slot: int, length: int) -> None:
        """The caller knows that this slot holds at most `length` tokens from now on."""
        self._bounds[slot] = min(self._bounds[slot], length)

    @torch.inference_mode(False)  # tensors of that mode could not be written outside it
    @torch.no_grad()
    def _resize(self, slots: int, columns: int) -> None:
        old = self.keys, self.values
        held, used = self.slots, self.capacity
        new = self._caches(slots, columns)
        for source, target in zip(old, new, strict=True):
            target[:held, :, :, :used] = source
        self.keys, self.values = new
        self.lengths = torch.cat((self.lengths, self.lengths.new_zeros(slots - held)))
        self._bounds += [0] * (slots - held)
        self._free += range(slots - 1, held - 1, -1)
        self.generation += 1

    def _caches(self, slots: int, columns: int) -> tuple[Tensor, Tensor]:
        config = self._config
        shape = (slots, config.num_layers, config.num_kv_heads, columns, config.head_dim)
        try:
            return self._like.new_zeros(shape), self._like.new_zeros(shape)  # unused columns must be finite
        except RuntimeError as error:
            got = f"{slots} slots of {columns} tokens: {str(error).splitlines()[0][:200]}"
            fix = "fewer sequences at once, or a smaller context capacity"
            raise DependencyError("The context cache does not fit into GPU memory", got=got, fix=fix) from error
