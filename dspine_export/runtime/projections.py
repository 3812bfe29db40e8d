"""A layer's projections in parts, which meet in the attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Projections:
    """q, k and v [R, p] as before + effect, over the root mean square of rows whose sums of squares are in parts float32 [T, R]."""

    before: Tensor
    effect: Tensor
    squares: Tensor

    def sums(self, width: int) -> dict[str, Any]:
        """What `block_attention` wants to know, for rows of that width."""
        return {"added": self.effect, "squares": self.squares, "width": width}
