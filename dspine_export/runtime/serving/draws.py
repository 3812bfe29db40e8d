"""Random numbers of one request.

Every request draws from a generator of its own, a fixed number of values per round whatever happens in it. So its n-th round sees the
same numbers alone or in any batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Uniforms = NDArray[np.float32]


class Draws:
    """Uniform numbers in [0, 1) from a seed, for blocks of B tokens; a greedy request draws none and gets zeros."""

    def __init__(self, seed: int, block_size: int, *, greedy: bool) -> None:
        self._generator = None if greedy else np.random.Generator(np.random.PCG64(seed))
        self._slots = block_size - 1

    def first(self) -> float:
        """For the token after the prompt."""
        return float(self._uniform(1)[0])

    def round(self) -> Uniforms:
        """For one round, float32 [2 * (B-1) + 1]: B-1 to draft with, B-1 to accept with, one for the token after."""
        return self._uniform(2 * self._slots + 1)

    def _uniform(self, count: int) -> Uniforms:
        if self._generator is None:
            return np.zeros(count, dtype=np.float32)
        return self._generator.random(count, dtype=np.float32)
