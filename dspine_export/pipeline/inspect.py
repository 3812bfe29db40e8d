"""``inspect``: validate a drafter checkpoint completely, without its target, and describe it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.checkpoint.load import Checkpoint, check_finite, open_checkpoint
from dspine_export.pipeline.progress import Progress, Silent
from dspine_export.recipes.memory import DrafterShape


def inspect_checkpoint(path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Check configuration, names, shapes, dtypes and every value; returns a JSON-ready description.

    Raises:
        CheckpointError: anything wrong with it.
    """
    progress = progress or Silent()
    with progress.stage("checkpoint", "configuration, names, shapes"):
        checkpoint = open_checkpoint(path)
    with progress.stage("values", "looking for NaN and infinity"):
        check_finite(checkpoint)
    for warning in checkpoint.warnings:
        progress.warn(warning)
    return describe(checkpoint)


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The description `inspect_checkpoint` returns, of a checkpoint that is already open."""
    infos = list(checkpoint.tensors.values())
    config = asdict(checkpoint.config)
    if config["transfer"] is not None:
        del config["transfer"]["probe"]
        config["transfer"]["extra"] = {
            key: value for key, value in config["transfer"]["extra"].items() if _plain(value)
        }
    return {
        "path": str(checkpoint.path),
        "config": config,
        "codes": codes_origin(checkpoint),
        "tensors": len(infos),
        "parameters": sum(_count(info.shape) for info in infos),
        "size_bytes": sum(info.size_bytes for info in infos),
        "dtypes": dict(Counter(info.dtype for info in infos)),
        "files": sorted({info.path.name for info in infos}),
        "warnings": list(checkpoint.warnings),
    }


def codes_origin(checkpoint: Checkpoint) -> str:
    """Where the transfer codes come from: ``stored``, ``recomputed`` from the target's lm_head, or ``none`` (no transfer space)."""
    if checkpoint.config.transfer is None:
        return "none"
    return "recomputed" if checkpoint.codes is None else "stored"


def drafter_shape(config: DrafterConfig) -> DrafterShape:
    """The sizes that decide memory."""
    transfer = config.transfer
    return DrafterShape(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_taps=config.num_taps,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        rank=transfer.rank if transfer else 0,
        message_size=transfer.message_size if transfer else 0,
    )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool | None)
