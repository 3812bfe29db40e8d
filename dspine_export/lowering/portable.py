"""The portable folder: float32 graphs that any ONNX Runtime executes, and the fused graphs' float32 twins for verification."""

from __future__ import annotations

from pathlib import Path

from dspine_export.checkpoint.load import Checkpoint
from dspine_export.checkpoint.target import TargetInfo
from dspine_export.lowering.onnx_export import WEIGHTS_FILE, export_onnx
from dspine_export.lowering.widen import widen
from dspine_export.passes.fold_tables import TOKEN_TABLE

# Twin in the portable folder -> graph of the fused folder.
TWINS = {"context.fused.onnx": "context.onnx", "draft.fused.onnx": "draft.onnx"}


def export_portable(checkpoint: Checkpoint, target: TargetInfo | None, out_dir: Path, fused_dir: Path) -> list[Path]:
    """Writes portable ``context.onnx`` and ``draft.onnx``, the twins of fused_dir's graphs, and the weights of all four.

    Raises:
        BuildError: a stage failed.
    """
    extra = () if checkpoint.config.transfer is None else (TOKEN_TABLE,)
    paths = export_onnx(checkpoint, target, out_dir, dtype="float32", form="portable", extra_weights=extra)
    for twin, fused in TWINS.items():
        widen(fused_dir / fused, out_dir / WEIGHTS_FILE, out_dir / twin)
    return [*paths, *(out_dir / twin for twin in TWINS)]
