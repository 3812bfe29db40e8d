"""``verify``: a bundle's files against its manifest, and its graphs against the torch model of the drafter inside it."""

from __future__ import annotations

from pathlib import Path

from dspine_export.bundle import Bundle, VerificationResult, open_bundle, sha256_of
from dspine_export.errors import UsageError
from dspine_export.pipeline.graphs import verify_graphs
from dspine_export.pipeline.pair import open_pair
from dspine_export.pipeline.progress import Progress
from dspine_export.pipeline.sources import DRAFTER_FOLDER


def verify_files(path: Path, progress: Progress) -> Bundle:
    """Check every listed file's presence, size and hash.

    Raises:
        UsageError: not a bundle. VerificationError: a file is missing, changed or not listed.
    """
    with progress.stage("files", f"hashing {path}"):
        return open_bundle(path, check_hashes=True)


def verify_bundle(bundle: Bundle, target_model: Path, progress: Progress) -> VerificationResult:
    """Run the recipe's verification again on a bundle's own files.

    Raises:
        UsageError: a bundle without graphs. CheckpointError: the target does not fit.
        VerificationError: the graphs do not reproduce the torch model.
    """
    recipe = bundle.manifest.recipe
    if recipe.build.target == "vllm":
        raise UsageError(
            "this bundle was built for vLLM and has no graphs to compare",
            where=bundle.path,
            fix="leave --target-model out to check its files, or build --target onnx",
        )
    pair = open_pair(bundle.path / DRAFTER_FOLDER, target_model, recipe, progress, finite=False)
    for source in bundle.manifest.sources:
        if source.role == "target" and sha256_of(target_model / source.name) != source.sha256:
            progress.warn(f"{target_model / source.name} is not the file this bundle was built with")
    with progress.stage("verify", "comparing both graphs with the torch model"):
        return verify_graphs(pair, recipe, bundle.path, progress)
