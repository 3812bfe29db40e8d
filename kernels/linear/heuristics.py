"""Tile choice of `linear`: enough programs to keep every multiprocessor loading, tiles no larger than that allows."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tile:
    """Tile sizes in elements, warps per program and pipeline stages."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


def tile(rows: int, columns: int, inner: int, dtype: torch.dtype, glu: bool) -> Tile:
    """The tile for an M x N x K product on a GPU with about 132 multiprocessors."""
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 2)
    height = 16 if rows <= 16 else 32 if rows <= 32 else 64
    depth = 128 if inner >= 1024 else 64
    if height == 64:
        return Tile(64, 64, 64, 4, 3 if glu else 4)
    if columns <= 2048:
        return Tile(height, 16, depth, 4, 4)
    if columns <= 8192:
        return Tile(height, 32, depth, 4, 5 if not glu else 4)
    return Tile(height, 32 if glu else 64, depth, 4, 4)
