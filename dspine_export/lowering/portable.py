"""The portable folder: float32 graphs that any ONNX Runtime executes, and the fused graph's float32 twin for verification."""

from __future__ import annotations

from pathlib import Path

from dspine_export.checkpoint.load import Checkpoint
from dspine_export.checkpoint.target import TargetInfo
from dspine_export.lowering.onnx_export import WEIGHTS_FILE, export_onnx
from dspine_export.lowering.widen import widen
from dspine_export.passes.fold_tables import TOKEN_TABLE

TWIN_FILE = "draft.fused.onnx"


def export_portable(checkpoint: Checkpoint, target: TargetInfo | None, out_dir: Path, fused_dir: Path) -> list[Path]:
    """Writes portable ``context.onnx`` and ``draft.onnx``, ``draft.fused.onnx`` (the twin of fused_dir's draft) and their weights.

    Raises:
        BuildError: a stage failed.
    """
    extra = () if checkpoint.config.transfer is None else (TOKEN_TABLE,)
    paths = export_onnx(checkpoint, target, out_dir, dtype="float32", form="portable", extra_weights=extra)
    twin = out_dir / TWIN_FILE
    widen(fused_dir / "draft.onnx", out_dir / WEIGHTS_FILE, twin)
    return [*paths, twin]
