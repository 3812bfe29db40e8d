"""What an engine has done so far, as plain data that servers export in their own formats."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dspine_export.runtime.serving.clock import SECTIONS, RoundTime, Section
from dspine_export.runtime.serving.outcomes import OUTCOMES, Outcome


@dataclass
class RoundTimes:
    """Rounds of one batch size.

    Attributes:
        rounds, seconds, model_seconds: of those that directly followed another (`clock.RoundTime`).
        turns, host_seconds: of the loop that read such a round and ran no prompt; what they took without waiting for the device and,
            where models run inside their calls, without the models. waits: turns that did wait, so that the device had the next round
            before it was done with this one.
    """

    rounds: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0
    turns: int = 0
    host_seconds: float = 0.0
    waits: int = 0

    def to_json(self) -> dict[str, float]:
        """Sums and, as `serving_share`, the part of a round that is not model time."""
        share = 1 - self.model_seconds / self.seconds if self.seconds else 0.0
        return {**vars(self), "serving_share": share}


@dataclass
class Counters:
    """Totals since the start (or the end of the warm-up).

    Attributes:
        requests: by outcome. prompt_tokens, generated_tokens: of admitted requests.
        rounds: draft-verify rounds over a batch. sequence_rounds: the same, counted once per sequence in the batch.
        drafted_tokens, accepted_tokens: checked by the target, and kept.
        accepted_lengths: sequence rounds by committed tokens, index 0 .. B (0: ended by a stop word in what came before).
        near_ties: greedy choices within `tolerance.NEAR_TIE`, where they are counted.
        model_seconds: by section. serving_seconds: the loop's time outside the models, idle time left out.
        batches: times of rounds, by batch size.
    """

    requests: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    prompt_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    sequence_rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    near_ties: int = 0
    model_seconds: dict[Section, float] = field(default_factory=lambda: dict.fromkeys(SECTIONS, 0.0))
    serving_seconds: float = 0.0
    batches: dict[int, RoundTimes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def request(self, outcome: Outcome) -> None:
        """One request has ended so; from any thread."""
        with self._lock:
            self.requests[outcome] += 1

    def sequence_round(self, drafted: int, accepted: int, committed: int, near_ties: int = 0) -> None:
        """One sequence's part of a round."""
        with self._lock:
            self.near_ties += near_ties
            self.sequence_rounds += 1
            self.drafted_tokens += drafted
            self.accepted_tokens += accepted
            self.generated_tokens += committed
            self.accepted_lengths += [0] * (committed + 1 - len(self.accepted_lengths))
            self.accepted_lengths[committed] += 1

    def loop(self, seconds: float, model: Mapping[Section, float], rounds: Iterable[RoundTime]) -> None:
        """One turn of the loop, with the model time and the rounds that have ended since the last one."""
        with self._lock:
            for name, value in model.items():
                self.model_seconds[name] += value
            self.serving_seconds += seconds - sum(model.values())
            for done in rounds:
                times = self.batches.setdefault(done.sequences, RoundTimes())
                times.rounds += 1
                times.seconds += done.seconds
                times.model_seconds += done.model_seconds

    def turn(self, batch: int, host_seconds: float, *, waited: bool, prompts: bool) -> None:
        """The loop has read a round over `batch` sequences."""
        with self._lock:
            self.rounds += 1
            if not prompts:
                times = self.batches.setdefault(batch, RoundTimes())
                times.turns += 1
                times.host_seconds += host_seconds
                times.waits += waited

    def first_token(self, prompt_tokens: int) -> None:
        """A prompt is in the cache and has yielded its token."""
        with self._lock:
            self.prompt_tokens += prompt_tokens
            self.generated_tokens += 1

    def snapshot(self) -> dict[str, Any]:
        """A consistent copy, JSON-ready."""
        with self._lock:
            return {
                "requests": dict(self.requests),
                "prompt_tokens": self.prompt_tokens,
                "generated_tokens": self.generated_tokens,
                "rounds": self.rounds,
                "sequence_rounds": self.sequence_rounds,
                "drafted_tokens": self.drafted_tokens,
                "accepted_tokens": self.accepted_tokens,
                "accepted_lengths": list(self.accepted_lengths),
                "near_ties": self.near_ties,
                "model_seconds": dict(self.model_seconds),
                "serving_seconds": self.serving_seconds,
                "batches": {size: times.to_json() for size, times in sorted(self.batches.items())},
            }
