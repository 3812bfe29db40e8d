"""What a list of samples says: throughput, latencies, acceptance."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tools.serving.clients import Sample

QUANTILES = (0.5, 0.9, 0.99)


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and quantiles in milliseconds; empty without values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    picked = {f"p{round(q * 100)}": ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)] for q in QUANTILES}
    return {name: round(value * 1e3, 2) for name, value in {"mean": sum(ordered) / len(ordered), **picked}.items()}


def first_token_seconds(sample: Sample) -> float:
    """From sending the request to its first tokens, seen by the client."""
    return sample.arrivals[0][0] - sample.started


def inter_token_seconds(sample: Sample) -> float | None:
    """Mean time between tokens after the first response; None where all came at once."""
    tokens = sum(count for _, count in sample.arrivals[1:])
    return (sample.arrivals[-1][0] - sample.arrivals[0][0]) / tokens if tokens else None


def acceptance_length(samples: Sequence[Sample]) -> float | None:
    """Tau over all samples: tokens behind the prompt's own, over the rounds that committed them."""
    tokens = rounds = 0.0
    for sample in samples:
        behind, tau = sample.final["completion_tokens"] - 1, sample.final["acceptance_length"]
        if behind > 0 and tau > 0:
            tokens += behind
            rounds += behind / tau
    return round(tokens / rounds, 3) if rounds else None


def summarise(samples: Sequence[Sample], wall_seconds: float) -> dict[str, Any]:
    """The figures of one run."""
    good = [sample for sample in samples if sample.error is None and sample.arrivals]
    gaps = [gap for gap in map(inter_token_seconds, good) if gap is not None]
    tokens = sum(len(sample.tokens) for sample in good)
    return {
        "requests": len(samples),
        "failed": sum(sample.error is not None for sample in samples),
        "errors": dict(
            Counter(str(sample.error)[:200] for sample in samples if sample.error is not None).most_common(5)
        ),
        "wall_seconds": round(wall_seconds, 2),
        "tokens": tokens,
        "tokens_per_second": round(tokens / wall_seconds, 2) if wall_seconds else 0.0,
        "time_to_first_token_ms": quantiles_ms([first_token_seconds(sample) for sample in good]),
        "inter_token_ms": quantiles_ms(gaps),
        "request_ms": quantiles_ms([sample.ended - sample.started for sample in good]),
        "queue_ms": quantiles_ms([sample.final["queue_seconds"] for sample in good]),
        "acceptance_length": acceptance_length(good),
        "acceptance_rate": _rate(good),
    }


def _rate(samples: Sequence[Sample]) -> float | None:
    drafted = sum(sample.final["total_draft_tokens"] for sample in samples)
    accepted = sum(sample.final["total_accepted_draft_tokens"] for sample in samples)
    return round(accepted / drafted, 4) if drafted else None
