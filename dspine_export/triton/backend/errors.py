"""Errors of a request in Triton's words."""

from __future__ import annotations

from typing import Any

from dspine_export.errors import DspineError
from dspine_export.runtime.serving.outcomes import Outcome, outcome_of

# Codes of pb_utils.TritonError; the server maps them to its HTTP and gRPC statuses.
_CODES: dict[Outcome, str] = {
    "invalid": "INVALID_ARG",
    "overloaded": "UNAVAILABLE",
    "unavailable": "UNAVAILABLE",
    "cancelled": "CANCELLED",
    "deadline": "CANCELLED",
    "error": "INTERNAL",
}


def error_response(pb_utils: Any, error: Exception) -> Any:
    """An `InferenceResponse` that says what went wrong."""
    code = getattr(pb_utils.TritonError, _CODES[outcome_of(error)])
    text = str(error) if isinstance(error, DspineError) else f"internal error: {type(error).__name__}: {error}"[:1000]
    return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(text, code))


def tensors_response(pb_utils: Any, arrays: dict[str, Any]) -> Any:
    """An `InferenceResponse` with these outputs."""
    return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, array) for name, array in arrays.items()])
