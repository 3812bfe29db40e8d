"""Acceptance statistics, in vLLM's words where vLLM has one.

A *draft* is one drafted block that the target checked; its *draft tokens* are those it was checked on. Then
acceptance rate = accepted / draft tokens; mean acceptance length = 1 + accepted / drafts; per-position rate = accepted at i / drafts.
`acceptance_length` (tau) counts committed tokens per target call, the bonus token included: at most B. The two lengths differ only
through blocks cut short by an end token or a length limit. The prompt's own pass and the token it yields count for neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AcceptanceStatistics:
    """Counters of one generation, or of several added up.

    Attributes:
        target_calls: target passes after the prompt's own.
        committed_tokens: tokens those passes produced.
        drafts, draft_tokens, accepted_tokens: drafted blocks, tokens checked in them, tokens kept from them.
        accepted_per_position: drafts whose token at slot i = 1, 2, .. was kept.
    """

    target_calls: int = 0
    committed_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def record(self, drafted: int, accepted: int, committed: int) -> None:
        """One target call that checked `drafted` tokens, kept `accepted` of them and committed `committed` in all."""
        self.target_calls += 1
        self.committed_tokens += committed
        if drafted:
            self.drafts += 1
            self.draft_tokens += drafted
            self.accepted_tokens += accepted
            self._count_positions([1] * accepted + [0] * (drafted - accepted))

    def add(self, other: AcceptanceStatistics) -> None:
        """Adds another generation's counters to these."""
        for name in ("target_calls", "committed_tokens", "drafts", "draft_tokens", "accepted_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._count_positions(other.accepted_per_position)

    @property
    def acceptance_length(self) -> float:
        """tau: committed tokens per target call, bonus included; 0 before the first call."""
        return self.committed_tokens / self.target_calls if self.target_calls else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0

    @property
    def per_position_rates(self) -> list[float]:
        return [count / self.drafts for count in self.accepted_per_position] if self.drafts else []

    @property
    def target_calls_saved(self) -> int:
        """Calls that a target generating one token at a time would have made in addition."""
        return self.committed_tokens - self.target_calls

    def to_json(self) -> dict[str, Any]:
        """Counters and rates, JSON-ready."""
        rates = (
            "acceptance_length",
            "acceptance_rate",
            "mean_acceptance_length",
            "per_position_rates",
            "target_calls_saved",
        )
        return {**vars(self), **{name: getattr(self, name) for name in rates}}

    def _count_positions(self, counts: list[int]) -> None:
        missing = len(counts) - len(self.accepted_per_position)
        self.accepted_per_position += [0] * max(missing, 0)
        for slot, count in enumerate(counts):
            self.accepted_per_position[slot] += count
