"""The incremental context cache of a batch of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspine_export.errors import UsageError


@dataclass
class DraftState:
    """Keys and values of committed tokens. Block rows never enter it.

    Attributes:
        keys, values: [N, L, Hkv, capacity, D]; rows at or beyond `lengths` are undefined but finite.
        lengths: int64 [N], committed tokens per sequence.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor

    @property
    def batch(self) -> int:
        return int(self.keys.shape[0])

    @property
    def capacity(self) -> int:
        return int(self.keys.shape[3])

    def append(self, keys: Tensor, values: Tensor, counts: Tensor) -> None:
        """Stores the first counts[n] of T new rows behind each sequence's last one. keys, values [N, L, Hkv, T, D]"""
        if bool((self.lengths + counts > self.capacity).any()):
            raise UsageError(
                "The context cache is full",
                where="append_context",
                got=f"lengths {(self.lengths + counts).tolist()} after the append",
                expected=f"at most the capacity, {self.capacity}",
                fix="create the state with new_state(batch, capacity) of at least the longest sequence",
            )
        row = torch.arange(keys.shape[3], device=keys.device)
        sequence, source = (row < counts[:, None]).nonzero(as_tuple=True)
        target = self.lengths[sequence] + source
        self.keys[sequence, :, :, target] = keys[sequence, :, :, source]
        self.values[sequence, :, :, target] = values[sequence, :, :, source]
        self.lengths = self.lengths + counts

    def truncate(self, lengths: Tensor) -> None:
        """Forgets rows at or beyond the given lengths, int64 [N]; a cache cannot grow this way."""
        fits = lengths.shape == self.lengths.shape and not lengths.is_floating_point()
        if not fits or bool((lengths > self.lengths).any()) or bool((lengths < 0).any()):
            raise UsageError(
                "truncate can only shorten the context",
                where="truncate",
                got=f"lengths {lengths.tolist()}",
                expected=f"integers [{self.batch}] between 0 and the current lengths {self.lengths.tolist()}",
            )
        self.lengths = lengths.to(torch.int64, copy=True)
