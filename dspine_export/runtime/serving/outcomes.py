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


def outcome_of(error: BaseException) -> Outcome:
    """The label an error is counted under."""
    if isinstance(error, ServingError):
        return error.outcome
    return "invalid" if isinstance(error, UsageError) else "error"
