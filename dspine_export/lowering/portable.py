"""The portable folder: float32 graphs that any ONNX Runtime executes, and the fused draft graph's float32 twin for verification."""

from __future__ import annotations

from pathlib import Path

from dspine_export.checkpoint.load import Checkpoint
from dspine_export.checkpoint.target import TargetInfo
from dspine_export.lowering.onnx_export import export_onnx
from dspine_export.lowering.widen import graph_weights, widen
from dspine_export.passes.fold_tables import TOKEN_TABLE

TWIN_FILE = "draft.fused.onnx"


def export_portable(checkpoint: Checkpoint, target: TargetInfo | None, out_dir: Path, fused_dir: Path) -> list[Path]:
    """Writes portable ``context.onnx`` and ``draft.onnx``, the twin of the fused draft graph, and the weights of all three.

    The context entry holds none of our operators, so its portable form is the fused folder's graph itself, widened to float32.

    Raises:
        BuildError: a stage failed.
    """
    extra = [] if checkpoint.config.transfer is None else [TOKEN_TABLE]
    extra += graph_weights(fused_dir / "context.onnx")
    draft, weights = export_onnx(
        checkpoint, target, out_dir, dtype="float32", form="portable", entries=("draft",), extra_weights=extra
    )
    context, twin = out_dir / "context.onnx", out_dir / TWIN_FILE
    widen(fused_dir / "context.onnx", weights, context)
    widen(fused_dir / "draft.onnx", weights, twin)
    return [context, draft, twin, weights]
