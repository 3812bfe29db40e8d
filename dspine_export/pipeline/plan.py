"""What a build will do and need, computed before anything is written; ``--dry-run`` prints it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dspine_export.checkpoint.load import Checkpoint
from dspine_export.pipeline.inspect import codes_origin, drafter_shape
from dspine_export.pipeline.pair import OpenPair
from dspine_export.pipeline.request import BuildRequest
from dspine_export.recipes.memory import DTYPE_BYTES, MemoryEstimate, estimate_memory


def estimate(checkpoint: Checkpoint, request: BuildRequest) -> MemoryEstimate:
    """Memory under the request's profile and dtype."""
    return estimate_memory(drafter_shape(checkpoint.config), request.recipe.profile, request.recipe.build.dtype)


def disk_bytes(checkpoint: Checkpoint, request: BuildRequest) -> int:
    """About how much the bundle will take: the drafter's copy, both forms of the graphs with their weights, and the plans; or its weights.

    The portable form holds the transfer codes beside the token table: its draft graph looks up the one, the fused twin the other.
    """
    stored = sum(info.size_bytes for info in checkpoint.tensors.values())
    sizes = estimate(checkpoint, request)
    if not request.wants_graphs:
        return stored + sizes.plans
    graphs = sizes.plans
    portable = graphs * DTYPE_BYTES["float32"] // DTYPE_BYTES[request.recipe.build.dtype]
    transfer = checkpoint.config.transfer
    codes = checkpoint.config.vocab_size * transfer.rank * DTYPE_BYTES["float32"] if transfer else 0
    return stored + graphs + portable + codes + (sizes.plans if request.wants_engine else 0)


def stage_names(request: BuildRequest) -> list[str]:
    """The stages a build goes through, in order."""
    if not request.wants_graphs:
        return ["drafter", "vllm", "manifest"]
    verify = ["verify"] if request.recipe.verification.enabled else []
    engine = ["plugins", "engine"] if request.wants_engine else []
    trtllm = ["trtllm"] if request.recipe.build.target == "trtllm" else []
    return ["drafter", "fused onnx", "portable onnx", *verify, *engine, *trtllm, "manifest"]


def describe_plan(pair: OpenPair, request: BuildRequest) -> dict[str, Any]:
    """The dry run's answer, JSON-ready. Sizes are estimates in bytes."""
    config = pair.checkpoint.config
    return {
        "dry_run": True,
        "output": str(request.output),
        "drafter": {
            "path": str(request.checkpoint),
            "architecture": config.architecture,
            "codes": codes_origin(pair.checkpoint),
        },
        "target": {"path": str(request.target_model), "architecture": pair.target.architecture},
        "recipe": request.recipe.model_dump(),
        "stages": stage_names(request),
        "memory_bytes": asdict(estimate(pair.checkpoint, request)),
        "disk_bytes": disk_bytes(pair.checkpoint, request),
    }
