"""What the user asked ``build`` to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspine_export.recipes import Recipe


@dataclass(frozen=True)
class BuildRequest:
    """One build. Everything that has a place in a recipe is in ``recipe``, with the options applied.

    Attributes:
        checkpoint: the drafter's directory.
        target_model: the target's Hugging Face directory.
        output: the bundle to create.
        force: replace an existing bundle.
        stop_after_onnx: leave the engine to a later ``build --resume``.
        plugin_library: an existing ``libdspine_trt_plugins.so``; None to find or build one.
        triton: also write a model repository for Triton Inference Server.
    """

    checkpoint: Path
    target_model: Path
    output: Path
    recipe: Recipe
    force: bool = False
    stop_after_onnx: bool = False
    plugin_library: Path | None = None
    triton: bool = False

    @property
    def wants_graphs(self) -> bool:
        """Whether this build exports and verifies graphs: vLLM runs the drafter's weights."""
        return self.recipe.build.target != "vllm"

    @property
    def wants_engine(self) -> bool:
        """Whether this build ends with plans."""
        return self.recipe.build.target == "trtllm" and not self.stop_after_onnx
