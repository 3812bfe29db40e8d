"""``build``: a drafter and its target in, a verified bundle out. Stages in order, each recorded in the manifest."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspine_export.bundle import (
    Bundle,
    EngineEntry,
    FileEntry,
    Manifest,
    SourceFile,
    StageRecord,
    VerificationResult,
    check_output,
    inventory,
    open_bundle,
    require_free_space,
    sha256_of,
    staged_bundle,
    write_manifest,
)
from dspine_export.errors import UsageError
from dspine_export.pipeline.engines import build_plans, check_engine, provide_plugins
from dspine_export.pipeline.graphs import describe_entries, export_graphs, verify_graphs
from dspine_export.pipeline.pair import OpenPair, open_pair
from dspine_export.pipeline.plan import describe_plan, disk_bytes, estimate
from dspine_export.pipeline.progress import Progress
from dspine_export.pipeline.request import BuildRequest
from dspine_export.pipeline.sources import copy_drafter, summarise, target_source
from dspine_export.pipeline.triton import Contents, write_into_bundle
from dspine_export.pipeline.trtllm import check_trtllm, warn_unused, write_trtllm
from dspine_export.pipeline.versions import collect_versions
from dspine_export.pipeline.vllm import check_vllm, register_drafter, write_vllm
from dspine_export.recipes import Recipe
from dspine_export.triton.model_config import messages

_REBUILT = ("engines/", "plugins/", "trtllm/")  # by a resumed build
_REPAIRED = ("engines/", "plugins/", "trtllm/legacy/")  # those that may be damaged before it


class _Stages:
    """Runs stages and remembers how long each took."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.records: list[StageRecord] = []

    @contextmanager
    def __call__(self, name: str, detail: str = "") -> Iterator[None]:
        started = time.monotonic()
        with self.progress.stage(name, detail):
            yield
        self.records.append(StageRecord(name=name, seconds=round(time.monotonic() - started, 3)))


def plan(request: BuildRequest, progress: Progress) -> dict[str, Any]:
    """Everything ``build`` checks before it writes, and what it would write. Raises what `build` raises up to that point."""
    return describe_plan(_prepare(request, progress), request)


def build(request: BuildRequest, progress: Progress) -> Bundle:
    """Build and publish a bundle.

    Raises:
        DspineError: with the exit code of whatever went wrong; the output directory is then as it was before.
    """
    pair = _prepare(request, progress)
    with staged_bundle(request.output, force=request.force) as staging:
        stages = _Stages(progress)
        with stages("drafter", "copying the checkpoint"):
            sources, copied = copy_drafter(pair.checkpoint, staging)
            sources.append(target_source(pair.target))
        if request.wants_graphs:
            export_graphs(pair, request.recipe, staging, stages)
        else:
            with stages("vllm", "drafter directory for vLLM"):
                write_vllm(pair, request, staging)
        verification: list[VerificationResult] = []
        if request.wants_graphs and request.recipe.verification.enabled:
            with stages("verify", "comparing both graphs with the torch model"):
                verification.append(verify_graphs(pair, request.recipe, staging, progress))
        engines = _engines(request.recipe, request.plugin_library, staging, stages) if request.wants_engine else []
        if request.recipe.build.target == "trtllm":
            with stages("trtllm", "module and configuration for TensorRT-LLM"):
                drafter = summarise(pair.checkpoint)
                write_trtllm(staging, request.output, drafter, request.recipe, engines, progress, request.target_model)
        if request.triton:
            with stages("triton", "model repository for tritonserver"):
                entries = describe_entries(pair.checkpoint.config, request.recipe.build.dtype)
                contents = Contents(summarise(pair.checkpoint), entries, engines, request.recipe)
                write_into_bundle(staging, request.output, contents, request.target_model)
        manifest = _manifest(pair, request.recipe, sources, stages, engines, verification)
        _finish(staging, manifest, copied, progress)
    register_drafter(request, progress)
    return open_bundle(request.output)


def resume(output: Path, recipe: Recipe | None, plugin_library: Path | None, progress: Progress) -> Bundle:
    """Add an engine for this machine's builder to a bundle that has its graphs; an older engine of the same id is replaced.

    Args:
        recipe: the bundle's recipe with changed options, or None to keep it. With ``build.target: trtllm`` a bundle of graphs gets its
            TensorRT-LLM folder too.

    Raises:
        UsageError: no bundle, or options that the finished graphs contradict. VerificationError: the bundle is damaged.
        Otherwise as `build`; the bundle is then as it was before.
    """
    with progress.stage("bundle", str(output)):
        seed = open_resumable(output, check_hashes=True)
    wanted = recipe or seed.manifest.recipe
    if wanted.build.dtype != seed.manifest.recipe.build.dtype:
        raise UsageError(
            "the graphs of this bundle are finished and have another dtype",
            got=wanted.build.dtype,
            expected=seed.manifest.recipe.build.dtype,
            fix="build a new bundle",
        )
    weights = sum(entry.size_bytes for entry in seed.manifest.files if entry.path.startswith("onnx/"))
    if not weights:
        raise UsageError("this bundle was built for vLLM and has no graphs to continue from", fix="build a new bundle")
    if wanted.build.target == "trtllm":
        check_trtllm(wanted, output)
    check_engine(wanted, plugin_library, weights)
    with staged_bundle(output, force=True, seed=seed) as staging:
        stages = _Stages(progress)
        engines, edited = _engines(wanted, plugin_library, staging, stages), list[FileEntry]()
        if wanted.build.target == "trtllm":
            with stages("trtllm", "module and configuration for TensorRT-LLM"):
                files = seed.manifest.files
                edited = write_trtllm(staging, output, seed.manifest.drafter, wanted, engines, progress, older=files)
        kept = _intact_engines(seed, {engine.id for engine in engines}, staging, progress)
        changes = {
            "recipe": wanted,
            "versions": {**seed.manifest.versions, **collect_versions()},
            "stages": (*seed.manifest.stages, *stages.records),
            "engines": (*kept, *engines),
        }
        unchanged = [entry for entry in seed.manifest.files if not entry.path.startswith(_REBUILT)]
        _finish(staging, {**dict(seed.manifest), **changes}, unchanged, progress, edited)
    return open_bundle(output)


def open_resumable(output: Path, *, check_hashes: bool = False) -> Bundle:
    """The bundle that `resume` starts from; engines and plugin library may be damaged, for they are built again."""
    return open_bundle(output, check_hashes=check_hashes, unchecked=_REPAIRED)


def _intact_engines(seed: Bundle, replaced: set[str], staging: Path, progress: Progress) -> list[EngineEntry]:
    """The older engines that were not ``replaced``; damaged ones are left out of the new bundle."""
    kept = []
    for engine in seed.manifest.engines:
        if engine.id in replaced:
            continue
        files = [entry for entry in seed.manifest.files if entry.path.startswith(f"{engine.id}/")]
        if all(seed.file(e.path).is_file() and sha256_of(seed.file(e.path)) == e.sha256 for e in files):
            kept.append(engine)
        else:
            progress.warn(f"left out {engine.id}: its files are missing or were changed")
            shutil.rmtree(staging / engine.id, ignore_errors=True)
    return kept


def _prepare(request: BuildRequest, progress: Progress) -> OpenPair:
    check_output(request.output, force=request.force)
    pair = open_pair(request.checkpoint, request.target_model, request.recipe, progress)
    if request.recipe.build.target == "trtllm":
        check_trtllm(request.recipe)
    if request.recipe.build.target == "vllm":
        check_vllm(pair, request)
    if request.triton:
        messages()
    else:
        warn_unused(request.recipe, progress)
    if request.wants_engine:
        check_engine(request.recipe, request.plugin_library, estimate(pair.checkpoint, request).draft_plan)
    require_free_space(request.output, disk_bytes(pair.checkpoint, request))
    return pair


def _engines(recipe: Recipe, plugin_library: Path | None, staging: Path, stages: _Stages) -> list[EngineEntry]:
    with stages("plugins", "TensorRT plugin library"):
        library = provide_plugins(staging, plugin_library, stages.progress)
    with stages("engine", "both plans"):
        return [build_plans(staging, library, recipe, stages.progress)]


def _manifest(
    pair: OpenPair,
    recipe: Recipe,
    sources: list[SourceFile],
    stages: _Stages,
    engines: list[EngineEntry],
    verification: list[VerificationResult],
) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "drafter": summarise(pair.checkpoint),
        "sources": tuple(sources),
        "versions": collect_versions(),
        "entries": {}
        if recipe.build.target == "vllm"
        else describe_entries(pair.checkpoint.config, recipe.build.dtype),
        "stages": tuple(stages.records),
        "engines": tuple(engines),
        "verification": tuple(verification),
    }


def _finish(
    staging: Path,
    fields: dict[str, Any],
    known: list[FileEntry],
    progress: Progress,
    edited: list[FileEntry] | None = None,
) -> None:
    """``edited`` files are listed as they were generated, not as they are."""
    generated = {entry.path: entry for entry in edited or []}
    with progress.stage("manifest", "hashing the bundle"):
        files = tuple(generated.get(entry.path, entry) for entry in inventory(staging, known))
        write_manifest(staging, Manifest(**{**fields, "files": files}))
