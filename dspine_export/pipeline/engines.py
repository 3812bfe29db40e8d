"""The engine stages: find a builder before the long work starts, provide the plugins, build, and describe the result."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dspine_plugins import build_plugins, find_plugins, load_abi
from dspine_plugins.build import AUTOREG_NAME, LIBRARY_NAME, LIBRARY_VARIABLE
from dspine_plugins.toolchain import find_toolchain

from dspine_export.bundle import EngineEntry
from dspine_export.errors import DependencyError
from dspine_export.lowering.engine import EngineReport, ProfileSpec, Range, build_engines
from dspine_export.lowering.engine.discovery import select
from dspine_export.lowering.engine.memory import check_memory
from dspine_export.lowering.engine.target import resolve_target
from dspine_export.pipeline.progress import Progress
from dspine_export.recipes import Profile, Recipe

PLUGIN_FOLDER = "plugins"


def check_engine(recipe: Recipe, plugin_library: Path | None, draft_plan_bytes: int) -> None:
    """Everything about the engine stages that can be known before the export starts, which takes far longer than this.

    Raises:
        DependencyError: builder, GPU architecture, plugin library, its tools or memory are missing. UsageError: bad architecture.
    """
    backend = select(recipe.build.builder)
    assert backend.version is not None
    assert backend.module is not None
    resolve_target(backend.name, backend.version, backend.module, recipe.build.compute_capability)
    if plugin_library is not None:
        load_abi(plugin_library)
    elif find_plugins() is None:
        find_toolchain()
    check_memory(draft_plan_bytes, what="the draft plan")


def provide_plugins(staging: Path, given: Path | None, progress: Progress) -> Path:
    """Put the plugin library into ``staging/plugins``.

    That is the given file, or the one DSPINE_PLUGIN_LIBRARY names; else a build of the present sources for the default architectures,
    which costs a file copy once it was made; else, on a machine without compiler, whatever build of these sources is at hand.

    Raises:
        DependencyError: unusable, or the tools to build it are missing. BuildError: it does not compile.
    """
    folder = staging / PLUGIN_FOLDER
    if given is None and not os.environ.get(LIBRARY_VARIABLE):
        try:
            progress.note("plugin library for this version, compiled if it was not before")
            return build_plugins(folder).path
        except DependencyError:
            if find_plugins() is None:
                raise
    found = find_plugins()
    source = given or (found.path if found else None)
    assert source is not None
    load_abi(source)
    folder.mkdir(exist_ok=True)
    destination = folder / LIBRARY_NAME
    for file in (source, source.with_name(AUTOREG_NAME)):  # the shim for hosts that only dlopen, where there is one
        copy = destination.with_name(LIBRARY_NAME if file is source else AUTOREG_NAME)
        copy.unlink(missing_ok=True)
        if file.is_file():
            shutil.copyfile(file, copy)
    return destination


def build_plans(staging: Path, plugin_library: Path | None, recipe: Recipe, progress: Progress) -> EngineEntry:
    """Build both plans from ``staging/onnx`` into ``staging/engines``.

    Raises:
        DependencyError, BuildError, UsageError, OutputError: see `lowering.engine.build_engines`.
    """
    report = build_engines(
        staging / "onnx",
        staging,
        profile=_profile(recipe.profile),
        plugin_library=plugin_library,
        builder=recipe.build.builder,
        compute_capability=recipe.build.compute_capability,
        carry_plugins=recipe.build.plugins_to_serialize,
        progress=progress.note,
    )
    for warning in report.warnings:
        progress.warn(warning)
    return _entry(report, staging, plugin_library, recipe)


def _entry(report: EngineReport, staging: Path, plugin_library: Path | None, recipe: Recipe) -> EngineEntry:
    folder = report.folder.relative_to(staging).as_posix()
    return EngineEntry(
        id=folder,
        builder=report.builder,
        builder_version=report.version,
        sm=report.sm,
        compute_capabilities=report.compute_capabilities,
        plugin_library=plugin_library.relative_to(staging).as_posix() if plugin_library else None,
        plugin_abi=_abi(plugin_library) if plugin_library else None,
        carries_plugins=plugin_library is not None and recipe.build.plugins_to_serialize,
        plans={plan.entry: f"{folder}/{plan.path}" for plan in report.plans},
        profile=recipe.profile,
        seconds=round(sum(plan.seconds for plan in report.plans), 3),
    )


def _abi(plugin_library: Path) -> str:
    abi = load_abi(plugin_library)
    return f"{abi.major}.{abi.minor}"


def _profile(profile: Profile) -> ProfileSpec:
    return ProfileSpec(
        batch=Range(profile.batch.min, profile.batch.opt, profile.batch.max),
        context=Range(profile.context.min, profile.context.opt, profile.context.max),
        tokens=Range(profile.tokens.min, profile.tokens.opt, profile.tokens.max),
    )
