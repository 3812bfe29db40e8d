"""What callers pass to the CUDA executor, checked without asking the device."""

from __future__ import annotations

from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.model.transition import MIN_TEMPERATURE


def check_append(config: DrafterConfig, batch: int, target_hidden: Tensor, counts: Tensor) -> None:
    """Shapes and types; the values of `counts` where they are on the host.

    Raises:
        UsageError: they do not fit.
    """
    shape, width = tuple(target_hidden.shape), config.num_taps * config.hidden_size
    if len(shape) != 3 or shape[0] != batch or shape[2] != width or not target_hidden.is_floating_point():
        raise UsageError(
            "Target hidden states have the wrong shape",
            got=f"{target_hidden.dtype} {list(shape)}",
            expected=f"floating point [{batch}, T, {width}]",
        )
    wrong = tuple(counts.shape) != (batch,) or counts.is_floating_point()
    if wrong or (counts.device.type == "cpu" and bool(((counts < 0) | (counts > shape[1])).any())):
        raise UsageError(
            "Counts do not fit the hidden states",
            got=counts.tolist(),
            expected=f"[{batch}] integers in 0 .. {shape[1]}",
        )


def check_draft(config: DrafterConfig, batch: int, anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor) -> None:
    """Shapes, and host values. Raises as `check_append`."""
    for name, got, expected in (
        ("anchor_ids", anchor_ids, (batch,)),
        ("temperature", temperature, (batch,)),
        ("uniforms", uniforms, (batch, config.block_size - 1)),
    ):
        if tuple(got.shape) != expected:
            raise UsageError("Wrong shape", where=name, got=list(got.shape), expected=list(expected))
    if anchor_ids.is_floating_point():
        raise UsageError("Wrong type of numbers", where="anchor_ids", got=anchor_ids.dtype, expected="integers")
    if anchor_ids.device.type == "cpu" and bool(((anchor_ids < 0) | (anchor_ids >= config.vocab_size)).any()):
        expected_ids = f"0 .. {config.vocab_size - 1}"
        raise UsageError("Anchor outside the vocabulary", got=anchor_ids.tolist(), expected=expected_ids)
    if temperature.device.type == "cpu" and bool(((temperature != 0) & ~(temperature >= MIN_TEMPERATURE)).any()):
        expected_heat = f"0 (greedy), or {MIN_TEMPERATURE:g} and more"
        raise UsageError("Temperature out of range", got=temperature.tolist(), expected=expected_heat)


def host_counts(counts: Tensor, rows: int) -> list[int]:
    """At most so many rows are appended per sequence: the counts where the host has them, else all `rows`."""
    if counts.device.type == "cpu":
        return [int(count) for count in counts.tolist()]
    return [rows] * len(counts)
