"""A launch of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One launch, or a few that belong together, and the stage it counts towards when a pass is taken apart."""

    stage: str
    run: Callable[[], object]
