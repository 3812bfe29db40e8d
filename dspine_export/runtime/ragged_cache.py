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

from dspine_export.runtime.slot_cache import SlotView

ATTENTION = "dspine_ragged"


class RaggedCache:
    """Keys and values [N, Hkv, C, D] of every target layer. C is fixed; `lengths` int64 [N] counts committed tokens.

    `longest` may hold the largest of them for the next pass, which then need not ask the device.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], lengths: Tensor) -> None:
        self.keys, self.values, self.lengths = keys, values, lengths
        self._positions, self._columns = lengths[:, None], 0
        self.longest: int | None = None

    @classmethod
    def empty(cls, layers: int, shape: tuple[int, int, int, int], like: Tensor) -> RaggedCache:
        """shape (N, Hkv, C, D), dtype and device of `like`."""
        lengths = torch.zeros(shape[0], dtype=torch.int64, device=like.device)
        return cls(
            [like.new_zeros(shape) for _ in range(layers)], [like.new_zeros(shape) for _ in range(layers)], lengths
        )

    @property
    def batch(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def capacity(self) -> int:
        return int(self.keys[0].shape[2])

    def next_positions(self, count: int) -> Tensor:
        """Positions of the next `count` tokens of every row, int64 [N, count]."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def begin(self, positions: Tensor) -> Tensor:
        """Announces the positions, int64 [N, T], of the next pass; returns its mask, bool [N, 1, T, C']: key position <= own position."""
        last = int(positions.max()) if self.longest is None else self.longest + positions.shape[1] - 1
        self._positions, self._columns, self.longest = positions, last + 1, None
        column = torch.arange(self._columns, device=positions.device)
        return (column <= positions.unsqueeze(-1)).unsqueeze(1)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the pass's keys and values [N, Hkv, T, D] of one layer; returns the first C' columns of its cache."""
        row = torch.arange(self.batch, device=keys.device)[:, None]
        self.keys[layer][row, :, self._positions] = keys.transpose(1, 2)
        self.values[layer][row, :, self._positions] = values.transpose(1, 2)
        return self.keys[layer][:, :, : self._columns], self.values[layer][:, :, : self._columns]

    def select(self, rows: Tensor) -> RaggedCache:
        """The sequences `rows`, int64 [M], copied."""
        return RaggedCache([k[rows] for k in self.keys], [v[rows] for v in self.values], self.lengths[rows])


def ragged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    ragged_cache: RaggedCache | SlotView,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function in transformers' interface. query [N, H, T, D], key and value [N, Hkv, T, D] -> [N, T, H, D]"""
    keys, values = ragged_cache.write(module.layer_idx, key, value)
    grouped = query.shape[1] != keys.shape[1]
    out = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2), None


def register_attention() -> None:
    """Makes `ATTENTION` known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, ragged_attention)
