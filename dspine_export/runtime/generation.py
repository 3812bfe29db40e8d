"""What a generation is asked for and what it returns; one sequence's end, limit and counters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dspine_export.errors import UsageError
from dspine_export.model.transition import MIN_TEMPERATURE
from dspine_export.runtime.statistics import AcceptanceStatistics

FinishReason = Literal["stop", "length"]
OnTokens = Callable[[int, list[int]], None]


@dataclass(frozen=True)
class Settings:
    """How to generate.

    Attributes:
        max_new_tokens: per sequence; the target's own position limit may cut it shorter.
        temperature: 0 is greedy. top_p: nucleus, used at temperature > 0.
        seed: of all random draws. eos_ids: tokens that end a sequence; the end token itself is kept.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf,
                f"0 (greedy), or {MIN_TEMPERATURE:g} and more",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("seed", -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
        ):
            if not valid:
                raise UsageError("Invalid generation setting", where=name, got=getattr(self, name), expected=expected)


@dataclass(frozen=True)
class GenerationResult:
    """One sequence's continuation.

    Attributes:
        token_ids: new tokens, the end token included where it was reached.
        finish_reason: "stop" at an end token, "length" at a limit.
        statistics: acceptance counters; without a drafter every call commits one token.
    """

    token_ids: list[int]
    finish_reason: FinishReason
    statistics: AcceptanceStatistics


@dataclass
class RunningSequence:
    """One sequence while it is generated: takes tokens until its end token or its limit."""

    index: int
    prompt_length: int
    limit: int
    eos_ids: frozenset[int]
    on_tokens: OnTokens | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    statistics: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)

    @property
    def remaining(self) -> int:
        return self.limit - len(self.tokens)

    def take(self, tokens: list[int]) -> int:
        """Appends tokens up to and including an end token or the limit; returns how many were kept."""
        kept = tokens[: self.remaining]
        for position, token in enumerate(kept):
            if token in self.eos_ids:
                kept, self.finish_reason = kept[: position + 1], "stop"
                break
        self.tokens += kept
        if self.finish_reason is None and self.remaining == 0:
            self.finish_reason = "length"
        if self.on_tokens is not None and kept:
            self.on_tokens(self.index, kept)
        return len(kept)

    def result(self) -> GenerationResult:
        assert self.finish_reason is not None
        return GenerationResult(self.tokens, self.finish_reason, self.statistics)
