"""Paired bootstrap over prompts for the acceptance length.

tau of a prompt set is committed tokens over calls, summed over its prompts; an arm's tau is the mean over sets. Resampling draws
prompts within every set, the same ones for every arm, so a difference of two arms is paired. Runs of one arm with several seeds are
pooled prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, resampled: Floats) -> Interval:
        low, high = np.percentile(resampled, [2.5, 97.5])
        return cls(round(float(value), 4), round(float(low), 4), round(float(high), 4))

    def __sub__(self, other: object) -> Interval:
        raise TypeError("intervals are not subtracted: resample the difference")


class Resampler:
    """The same resampled prompts for every arm; ``sets`` names the set of every prompt."""

    def __init__(self, sets: Sequence[str], draws: int = 2000, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.rows = [np.array([i for i, own in enumerate(sets) if own == name]) for name in dict.fromkeys(sets)]
        self.counts: list[Floats] = []  # per set [draws, prompts]: how often each prompt is drawn
        for rows in self.rows:
            share = np.full(len(rows), 1 / len(rows))
            self.counts.append(generator.multinomial(len(rows), share, size=draws).astype(np.float64))

    def tau(self, committed: Floats, calls: Floats) -> tuple[float, Floats]:
        """tau of one arm and its resampled values; both arrays run over prompts. Sets without calls are left out, in every draw too."""
        values, resampled, counted = [], [], []
        for rows, counts in zip(self.rows, self.counts, strict=True):
            if calls[rows].sum() > 0:
                drawn = counts @ calls[rows]
                values.append(committed[rows].sum() / calls[rows].sum())
                resampled.append((counts @ committed[rows]) / np.maximum(drawn, 1e-9))
                counted.append(drawn > 0)
        return float(np.mean(values)), np.sum(resampled, axis=0) / np.maximum(np.sum(counted, axis=0), 1)

    def arm(self, committed: Floats, calls: Floats) -> Interval:
        return Interval.of(*self.tau(committed, calls))

    def difference(self, one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> Interval:
        """tau(one) - tau(other), each given as (committed, calls)."""
        (value, resampled), (base, base_resampled) = self.tau(*one), self.tau(*other)
        return Interval.of(value - base, resampled - base_resampled)

    def gain(self, one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> Interval:
        """tau(one) / tau(other) - 1."""
        (value, resampled), (base, base_resampled) = self.tau(*one), self.tau(*other)
        return Interval.of(value / base - 1, resampled / base_resampled - 1)


def pooled(runs: Sequence[Sequence[Mapping[str, int]]], keep: NDArray[np.bool_] | None = None) -> tuple[Floats, Floats]:
    """(committed, calls) per prompt, summed over the runs of an arm; prompts outside ``keep`` count nothing."""
    committed = np.array([[p["committed"] for p in run] for run in runs], dtype=np.float64).sum(0)
    calls = np.array([[p["calls"] for p in run] for run in runs], dtype=np.float64).sum(0)
    return (committed, calls) if keep is None else (committed * keep, calls * keep)
