"""How a request can end other than with its text. Every such end is an exception, and a label in the counters."""

from __future__ import annotations

from typing import Literal

from dspine_export.errors import DspineError, UsageError

Outcome = Literal["ok", "invalid", "overloaded", "cancelled", "deadline", "error", "unavailable"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "invalid", "overloaded", "cancelled", "deadline", "error", "unavailable")


class ServingError(DspineError):
    """A request that was valid and could not be completed."""

    outcome: Outcome = "error"


class OverloadedError(ServingError):
    """The queue is full; nothing of the request was done."""

    outcome: Outcome = "overloaded"


class CancelledError(ServingError):
    """The caller gave the request up."""

    outcome: Outcome = "cancelled"


class DeadlineError(ServingError):
    """The request's own deadline passed."""

    outcome: Outcome = "deadline"


class UnavailableError(ServingError):
    """The engine is shutting down, or has failed for good."""

    outcome: Outcome = "unavailable"


def not_finite() -> ServingError:
    """The target's logits cannot be used."""
    fix = "serve it in float32, or check its weights"
    return ServingError("The target returned values that are not finite", fix=fix)


def inside_engine(error: Exception) -> ServingError:
    """Something raised that the request cannot be blamed for."""
    return ServingError("This request failed inside the engine", got=f"{type(error).__name__}: {error}"[:400])


def outcome_of(error: BaseException) -> Outcome:
    """The label an error is counted under."""
    if isinstance(error, ServingError):
        return error.outcome
    return "invalid" if isinstance(error, UsageError) else "error"
