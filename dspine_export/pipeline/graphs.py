"""The graph stages: export both forms, compare them with the torch model, and state their contract."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from dspine_export.bundle import EntryContract, TensorSpec, VerificationResult
from dspine_export.capture.entries import context_contract, draft_contract
from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.lowering.onnx_export import export_onnx
from dspine_export.lowering.portable import export_portable
from dspine_export.lowering.verify import require_passed, verify_onnx
from dspine_export.pipeline.pair import OpenPair
from dspine_export.pipeline.progress import Progress
from dspine_export.recipes import Recipe

FUSED_FOLDER, PORTABLE_FOLDER = "onnx", "portable"


def export_graphs(
    pair: OpenPair, recipe: Recipe, staging: Path, stages: Callable[[str, str], AbstractContextManager[None]]
) -> None:
    """Write the fused form in the recipe's dtype and the portable form in float32.

    Raises:
        BuildError: a pass or the exporter failed. CheckpointError: transfer codes cannot be recomputed.
    """
    checkpoint, target = pair.checkpoint, pair.target
    with stages("fused onnx", f"both entries in {recipe.build.dtype}"):
        export_onnx(checkpoint, target, staging / FUSED_FOLDER, dtype=recipe.build.dtype, form="fused")
    with stages("portable onnx", "both entries in float32, standard operators only"):
        export_portable(checkpoint, target, staging / PORTABLE_FOLDER, staging / FUSED_FOLDER)


def describe_entries(config: DrafterConfig, dtype: str) -> dict[str, EntryContract]:
    """Inputs and outputs of both entries with the compute dtype filled in."""
    contracts = (context_contract(config), draft_contract(config))
    return {
        contract.name: EntryContract(
            inputs=tuple(
                TensorSpec(name=t.name, dtype=dtype if t.dtype == "T" else t.dtype, shape=t.shape)
                for t in contract.inputs
            ),
            outputs=tuple(
                TensorSpec(name=t.name, dtype=dtype if t.dtype == "T" else t.dtype, shape=t.shape)
                for t in contract.outputs
            ),
        )
        for contract in contracts
    }


def verify_graphs(pair: OpenPair, recipe: Recipe, folder: Path, progress: Progress) -> VerificationResult:
    """Compare the graphs below ``folder`` with the torch model in ONNX Runtime: the portable form and the fused form's float32 twin.

    Raises:
        VerificationError: they differ; the first differing tensor is named. BuildError: ONNX Runtime cannot load one.
    """
    report = verify_onnx(
        pair.checkpoint,
        pair.target,
        folder / PORTABLE_FOLDER,
        cases=recipe.verification.cases,
        seed=recipe.verification.seed,
        progress=progress.note,
    )
    require_passed(report)
    return VerificationResult(
        executor="onnxruntime",
        dtype=report.dtype,
        passed=report.passed,
        graphs=report.graphs,
        tokens=report.tokens,
        near_ties=report.near_ties,
        largest_error=report.largest_error,
    )
