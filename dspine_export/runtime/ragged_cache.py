"""The target's key/value cache: static, batched, each sequence at its own length; and the attention that reads it.

transformers' own caches keep one length for the whole batch. Here every row is written at its own positions, and rolling back is
forgetting: rows at or beyond a sequence's length are masked until they are overwritten.

One attention for every pass (prompt, single token, block): torch's scaled_dot_product_attention with an explicit boolean mask. Greedy
speculative output can equal the target's own only if both come from the same computation; the eager path would do as well, but builds
[N, H, T, C] score tensors for the prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dspine_export.runtime.captured_verify import StaticRows
from dspine_export.runtime.slot_cache import SlotCache, SlotView

ATTENTION = "dspine_ragged"


class Lease:
    """The right to a cache's slots: they are free for others when nobody holds it any more."""

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache


class RaggedCache:
    """Keys and values [S, Hkv, C, D] of every target layer. C is fixed; `lengths` int64 [N] counts committed tokens.

    Sequence n lies in row n of S = N; within the slots of a `lease`, in slot index[n]. `longest` may hold the largest length for the next
    pass, which then need not ask the device.
    """

    def __init__(
        self, keys: list[Tensor], values: list[Tensor], lengths: Tensor, index: Tensor | None = None, lease: Lease | None = None
    ) -> None:  # fmt: skip
        self.keys, self.values, self.lengths, self._lease = keys, values, lengths, lease
        self._leading = index is None
        self.index = torch.arange(len(lengths), device=lengths.device) if index is None else index
        self._positions, self._columns = lengths[:, None], 0
        self.longest: int | None = None

    @classmethod
    def empty(cls, layers: int, shape: tuple[int, int, int, int], like: Tensor) -> RaggedCache:
        """shape (N, Hkv, C, D), dtype and device of `like`."""
        lengths = torch.zeros(shape[0], dtype=torch.int64, device=like.device)
        return cls(
            [like.new_zeros(shape) for _ in range(layers)], [like.new_zeros(shape) for _ in range(layers)], lengths
        )

    @classmethod
    def within(cls, lease: Lease, batch: int) -> RaggedCache:
        """Empty sequences in the first `batch` slots of a cache."""
        cache = lease.cache
        lengths = torch.zeros(batch, dtype=torch.int64, device=cache.keys[0].device)
        return cls(cache.keys, cache.values, lengths, lease=lease)

    @property
    def storage(self) -> SlotCache | None:
        """The cache, where passes over it can be captured."""
        return None if self._lease is None else self._lease.cache

    @property
    def batch(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def capacity(self) -> int:
        return int(self.keys[0].shape[2])

    def next_positions(self, count: int) -> Tensor:
        """Positions of the next `count` tokens of every row, int64 [N, count]."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def reach(self, count: int) -> int:
        """Columns up to the last of `count` more tokens of the longest sequence; asks the device unless `longest` says it."""
        return (int(self.lengths.max()) if self.longest is None else self.longest) + count

    def begin(self, positions: Tensor) -> Tensor:
        """Announces the positions, int64 [N, T], of the next pass; returns its mask, bool [N, 1, T, C']: key position <= own position."""
        self._positions, self._columns, self.longest = positions, self.reach(positions.shape[1]), None
        column = torch.arange(self._columns, device=positions.device)
        return (column <= positions.unsqueeze(-1)).unsqueeze(1)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the pass's keys and values [N, Hkv, T, D] of one layer; returns the first C' columns of its cache."""
        return self._store(self.keys[layer], keys), self._store(self.values[layer], values)

    def _store(self, cache: Tensor, new: Tensor) -> Tensor:
        cache[self.index[:, None], :, self._positions] = new.transpose(1, 2)
        attended = cache[:, :, : self._columns]
        return attended[: self.batch] if self._leading else attended.index_select(0, self.index)

    def select(self, rows: Tensor) -> RaggedCache:
        """The sequences `rows`, int64 [M]: copied, or in the slots that they have."""
        if self._lease is not None:
            return RaggedCache(self.keys, self.values, self.lengths[rows], self.index[rows], self._lease)
        return RaggedCache([k[rows] for k in self.keys], [v[rows] for v in self.values], self.lengths[rows])


def ragged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    ragged_cache: RaggedCache | SlotView | StaticRows,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function in transformers' interface. query [N, H, T, D], key and value [N, Hkv, T, D] -> [N, T, H, D]"""
    keys, values = ragged_cache.write(module.layer_idx, key, value)
    if isinstance(ragged_cache, StaticRows):
        n, heads, tokens, size = query.shape
        folded = query.reshape(n, keys.shape[1], -1, size)  # [N, Hkv, G*T, D]
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=attention_mask, scale=scaling)
        return out.reshape(n, heads, tokens, size).transpose(1, 2), None
    grouped = query.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2), None


def register_attention() -> None:
    """Makes `ATTENTION` known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, ragged_attention)
