"""The stage that writes ``OUT/trtllm``, and what can be known about it before the build starts."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from dspine_export.bundle import DrafterSummary, EngineEntry, FileEntry, sha256_of
from dspine_export.errors import UsageError
from dspine_export.pipeline.progress import Progress
from dspine_export.recipes import Recipe
from dspine_export.trtllm.files import (
    FOLDER,
    MODEL_YAML,
    ServingOptions,
    describe_edits,
    editable_files,
    read_target_model,
    write_files,
)
from dspine_export.trtllm.legacy import LABEL, write_legacy
from dspine_export.trtllm.versions import require_checked, unchecked_allowed

_PACKAGE = "tensorrt_llm"
_UNKNOWN_TARGET = "TARGET_MODEL"
_LEGACY_BUILDER = "tensorrt"


def check_trtllm(recipe: Recipe, bundle: Path | None = None) -> None:
    """Refuse early what the stage or the server would refuse later.

    Args:
        bundle: the finished bundle that the stage will take the target's place from.

    Raises:
        DependencyError: an installed TensorRT-LLM whose hooks were not signature-checked. UsageError: the bundle's model.yaml is damaged.
    """
    if bundle is not None:
        read_target_model(bundle)
    try:
        version = importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return  # it may well be another machine that serves
    require_checked(version, allow_unchecked=unchecked_allowed(recipe.trtllm.allow_unchecked))


def warn_unused(recipe: Recipe, progress: Progress) -> None:
    """Say which options for TensorRT-LLM a build of another target leaves without effect."""
    if recipe.build.target == "trtllm":
        return
    names = [f"trtllm.{name}" for name in recipe.trtllm.model_dump(exclude_defaults=True)]
    if names:
        told = f"{', '.join(names)}: without effect on --target {recipe.build.target}, which writes no {FOLDER} folder"
        progress.warn(f"{told}; choose --target trtllm")


def write_trtllm(
    staging: Path,
    output: Path,
    drafter: DrafterSummary,
    recipe: Recipe,
    engines: list[EngineEntry],
    progress: Progress,
    target_model: Path | None = None,
    older: tuple[FileEntry, ...] = (),
) -> list[FileEntry]:
    """Write ``staging/trtllm`` for the bundle that will be ``output``.

    Args:
        target_model: None to keep the target of the files already there.
        older: the manifest's entries for files already there. Configuration that was edited since is kept.

    Returns:
        Entries of what was kept, as once generated: the manifest goes on naming that, or the next build would take the edit for its own.

    Raises:
        UsageError: a plan executor for a drafter that has none, or damaged older files.
    """
    chosen = recipe.trtllm
    if chosen.executor == "plan" and drafter.transfer_rank is None:
        raise UsageError(
            "the plan executor serves DSpine drafters", got=drafter.architecture, fix="set trtllm.executor=torch"
        )
    target = str(target_model.absolute()) if target_model else read_target_model(staging)
    options = ServingOptions(
        output=output.absolute(),
        target_model=target or _UNKNOWN_TARGET,
        block_size=drafter.block_size,
        mask_token_id=drafter.mask_token_id,
        target_layer_ids=drafter.target_layer_ids,
        max_batch_size=recipe.profile.batch.max,
        max_seq_len=recipe.profile.context.max,
        executor=chosen.executor,
        attention_backend=chosen.attention_backend,
        allow_unchecked=chosen.allow_unchecked,
    )
    kept = _edited(staging, options, older)
    write_files(staging, options, keep=[staging / entry.path for entry in kept])
    for entry in kept:
        path = staging / entry.path
        edits = describe_edits(path, editable_files(staging, options)[path])
        progress.warn(f"kept {entry.path}, which was edited: {edits}; delete it and resume to have it written anew")
    if options.target_model == _UNKNOWN_TARGET:
        progress.warn(f"the target's place is not known here: replace {_UNKNOWN_TARGET} in {FOLDER}/{MODEL_YAML}")
    _warn_about_config(staging, progress)
    if chosen.executor == "plan" and not engines:
        progress.warn("the plan executor has no engine yet: build --resume on the machine that serves")
    if chosen.legacy_layout:
        _write_legacy(staging, drafter, recipe, engines, progress)
    return kept


def _edited(staging: Path, options: ServingOptions, older: tuple[FileEntry, ...]) -> list[FileEntry]:
    """Entries of configuration files that are no longer what was generated."""
    editable = {path.relative_to(staging).as_posix(): path for path in editable_files(staging, options)}
    there = [entry for entry in older if entry.path in editable and editable[entry.path].is_file()]
    return [entry for entry in there if sha256_of(editable[entry.path]) != entry.sha256]


def _write_legacy(
    staging: Path, drafter: DrafterSummary, recipe: Recipe, engines: list[EngineEntry], progress: Progress
) -> None:
    if not engines:
        progress.warn("--legacy-layout needs an engine: it is written by build --resume")
        return
    engine = engines[-1]
    if engine.builder != _LEGACY_BUILDER:
        progress.warn(f"{LABEL}: those versions load TensorRT 10 engines, and this one was built by {engine.builder}")
    write_legacy(staging, engine, drafter, recipe.build.dtype)


def _warn_about_config(staging: Path, progress: Progress) -> None:
    """TensorRT-LLM reads the drafter's config.json itself, as a Hugging Face configuration."""
    path = staging / "drafter" / "config.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in ("model_type", "architectures") if not document.get(key)]
    if missing:
        progress.warn(f"TensorRT-LLM cannot read this drafter's config.json: it has no {' and no '.join(missing)}")
