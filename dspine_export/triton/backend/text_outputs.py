"""Answers of the text model as numpy arrays, in the shapes of the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspine_export.runtime.serving.request import Completion

Arrays = dict[str, NDArray[Any]]


def piece_arrays(text: str, token_ids: Sequence[int], *, batched: bool) -> Arrays:
    """What every response of a stream carries. `batched`: the model has a batch dimension, here of size 1."""
    return _shaped({"text_output": _text(text), "output_ids": np.array(token_ids, dtype=np.int32)}, batched)


def final_arrays(text: str, token_ids: Sequence[int], completion: Completion, *, batched: bool) -> Arrays:
    """The last response: the rest of the text, and the figures."""
    statistics = completion.statistics
    integers = {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "total_accepted_draft_tokens": statistics.accepted_tokens,
        "total_draft_tokens": statistics.draft_tokens,
    }
    floats = {
        "acceptance_rate": statistics.acceptance_rate,
        "acceptance_length": statistics.acceptance_length,
        "queue_seconds": completion.queue_seconds,
        "time_to_first_token": completion.first_token_seconds,
    }
    arrays: Arrays = {"finish_reason": _text(completion.finish_reason)}
    arrays |= {name: np.array([value], dtype=np.int32) for name, value in integers.items()}
    arrays |= {name: np.array([value], dtype=np.float32) for name, value in floats.items()}
    arrays["accepted_per_position"] = np.array(statistics.accepted_per_position, dtype=np.int32)
    return piece_arrays(text, token_ids, batched=batched) | _shaped(arrays, batched)


def _text(text: str) -> NDArray[Any]:
    return np.array([text.encode("utf-8", errors="replace")], dtype=np.object_)


def _shaped(arrays: Arrays, batched: bool) -> Arrays:
    return {name: array[None] for name, array in arrays.items()} if batched else arrays
