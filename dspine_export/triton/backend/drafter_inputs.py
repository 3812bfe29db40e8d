"""One request of the token-level model, validated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.runtime.generation import Settings

Read = Callable[[str], Tensor | None]  # an input by its name as a tensor without batch dimension, None where left out


@dataclass(frozen=True)
class DraftRequest:
    """A step of one sequence.

    Attributes:
        correlation_id, start, end: the sequence and where it begins and ends.
        truncate_to: committed tokens to keep first, None for all.
        hidden: [count, A*d] states to commit, None for none. anchor: None drafts nothing.
    """

    correlation_id: int
    start: bool
    end: bool
    truncate_to: int | None
    hidden: Tensor | None
    anchor: int | None
    temperature: float
    seed: int


def parse_step(read: Read, config: DrafterConfig) -> DraftRequest:
    """Validates one request. Raises UsageError."""
    anchor, temperature = _integer(read, "anchor_id"), _number(read, "temperature", 0.0)
    if anchor is not None and not 0 <= anchor < config.vocab_size:
        raise _wrong("anchor_id", anchor, f"0 .. {config.vocab_size - 1}")
    if temperature > 0 and not config.is_dspine:
        raise _wrong("temperature", temperature, "0: a DFlash drafter drafts greedily, let the verifier sample")
    Settings(temperature=temperature)
    seed, truncate_to = _integer(read, "random_seed"), _integer(read, "truncate_to")
    if truncate_to is not None and truncate_to < 0:
        raise _wrong("truncate_to", truncate_to, "at least 0")
    return DraftRequest(
        correlation_id=_integer(read, "CORRID") or 0,
        start=bool(_integer(read, "START")),
        end=bool(_integer(read, "END")),
        truncate_to=truncate_to,
        hidden=_hidden(read, config),
        anchor=anchor,
        temperature=temperature,
        seed=(seed or 0) % 2**64,
    )


def _hidden(read: Read, config: DrafterConfig) -> Tensor | None:
    hidden, count, width = read("target_hidden"), _integer(read, "count"), config.num_taps * config.hidden_size
    if hidden is None:
        if count:
            raise _wrong("count", count, "0 where target_hidden is left out")
        return None
    if hidden.ndim != 2 or hidden.shape[1] != width or not hidden.is_floating_point():
        taps = ", ".join(map(str, config.target_layer_ids))
        expected = f"floating point [T, {width}]: outputs of target layers {taps}, concatenated"
        raise _wrong("target_hidden", f"{hidden.dtype} {list(hidden.shape)}", expected)
    count = hidden.shape[0] if count is None else count
    if not 0 <= count <= hidden.shape[0]:
        raise _wrong("count", count, f"0 .. {hidden.shape[0]}, the rows of target_hidden")
    if not bool(hidden[:count].isfinite().all()):
        raise _wrong("target_hidden", "NaN or infinity", "finite values")
    return hidden[:count] if count else None


def _integer(read: Read, name: str) -> int | None:
    value = _one(read, name)
    return None if value is None else int(value)


def _number(read: Read, name: str, default: float) -> float:
    value = _one(read, name)
    return default if value is None else float(value)


def _one(read: Read, name: str) -> Any:
    tensor = read(name)
    if tensor is None:
        return None
    if tensor.numel() != 1:
        raise _wrong(name, list(tensor.shape), "one value")
    return tensor.reshape(-1)[0].item()


def _wrong(name: str, got: object, expected: str) -> UsageError:
    return UsageError("An input is wrong", where=name, got=got, expected=expected)
