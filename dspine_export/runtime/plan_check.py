"""Whether a plan may be loaded here, decided from the manifest before a byte of it is deserialised.

A runtime given a plan of another version, GPU or plugin interface answers with an internal error, a wrong result or a crash. Each
mismatch is named here instead, with both sides and the command that rebuilds the plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dspine_export.bundle import Bundle, EngineEntry, sha256_of
from dspine_export.errors import DependencyError, UsageError, VerificationError
from dspine_export.lowering.engine.report import REPORT_NAME

_NAMES = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}
_NOTHING = "no usable TensorRT"


@dataclass(frozen=True)
class PlanHost:
    """What would load the plan.

    Attributes:
        builder: ``tensorrt`` or ``tensorrt-rtx``.
        version: of that library, such as ``10.14.1.48``.
        compute_capability: (major, minor) of the GPU, None without one.
    """

    builder: str
    version: str
    compute_capability: tuple[int, int] | None

    def __str__(self) -> str:
        return f"{_NAMES.get(self.builder, self.builder)} {self.version}".rstrip()


@dataclass(frozen=True)
class CheckedEngine:
    """An engine that may be loaded here.

    Attributes:
        entry: its record in the manifest.
        plans: files by entry point.
        has_plugins: whether its plans call the plugin library (as build.json lists their layers) and do not carry it themselves.
    """

    entry: EngineEntry
    plans: dict[str, Path]
    has_plugins: bool


def choose_engine(
    bundle: Bundle, compute_capability: tuple[int, int] | None, installed: Sequence[tuple[str, str]] | None = None
) -> CheckedEngine:
    """The engine of ``bundle`` for this process: built by an installed library of the same version, for this GPU, files unchanged.

    Args:
        compute_capability: (major, minor) of the GPU, None without one.
        installed: (builder, version) of the usable libraries; None to look for them.

    Raises:
        UsageError: the bundle has no engine. DependencyError: none fits, and what differs. VerificationError: a changed file.
    """
    if not bundle.manifest.engines:
        raise UsageError("the bundle has no engine", where=bundle.path, fix=rebuild_command(bundle))
    versions = dict(_installed() if installed is None else installed)
    mismatches: list[tuple[int, DependencyError]] = []
    for engine in bundle.manifest.engines:
        if engine.builder in versions:
            host = PlanHost(engine.builder, versions[engine.builder], compute_capability)
        else:
            name = next(iter(versions), None)
            host = (
                PlanHost(name, versions[name], compute_capability)
                if name
                else PlanHost(_NOTHING, "", compute_capability)
            )
        try:
            check_plan(bundle, engine, host)
        except DependencyError as error:
            mismatches.append((engine.builder == host.builder, error))
            continue
        plans = {entry: bundle.file(relative) for entry, relative in engine.plans.items()}
        return CheckedEngine(engine, plans, not engine.carries_plugins and _calls_plugins(bundle, engine))
    raise max(mismatches, key=lambda entry: entry[0])[1]


def _installed() -> list[tuple[str, str]]:
    from dspine_export.lowering.engine.discovery import BUILDERS, discover

    found = [discover(name) for name in BUILDERS]
    return [(entry.name, str(entry.version)) for entry in found if entry.usable]


def _calls_plugins(bundle: Bundle, engine: EngineEntry) -> bool:
    report = _report(engine)
    if all(entry.path != report for entry in bundle.manifest.files):
        return engine.plugin_library is not None
    path = bundle.file(report)
    try:
        plans = json.loads(path.read_bytes()).get("plans", [])
        return any(plan.get("network", {}).get("plugin_layers") for plan in plans)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise VerificationError(
            "the record of the engine's build is damaged", where=path, got=error, fix=rebuild_command(bundle)
        ) from error


def _report(engine: EngineEntry) -> str:
    return f"{engine.id}/{REPORT_NAME}"


def check_plan(bundle: Bundle, engine: EngineEntry, host: PlanHost) -> None:
    """Refuse a plan that does not fit: library and version, GPU, plugin interface, the files' hashes, the plugin library.

    Raises:
        DependencyError, VerificationError: as `choose_engine`.
    """
    where = bundle.file(engine.id)
    _check_library(bundle, engine, host, where)
    _check_gpu(bundle, engine, host, where)
    _check_plugin_abi(bundle, engine, where)
    recorded = {entry.path: entry for entry in bundle.manifest.files}
    named = [*engine.plans.values(), *([engine.plugin_library] if engine.plugin_library else [])]
    report = [_report(engine)] if _report(engine) in recorded else []
    for relative in (*named, *report):
        _check_hash(bundle, bundle.file(relative), recorded[relative].sha256)
    _check_plugin_library(bundle, engine)


def rebuild_command(bundle: Bundle) -> str:
    """The command that adds an engine for the present machine to ``bundle``."""
    return f"run on this machine: dspine-export build --resume {bundle.path}"


def _check_library(bundle: Bundle, engine: EngineEntry, host: PlanHost, where: Path) -> None:
    built = PlanHost(engine.builder, engine.builder_version, None)
    if host.builder == _NOTHING:
        raise DependencyError(
            "nothing is installed here that could load the plan",
            where=where,
            got=_NOTHING,
            expected=f"{built}, which built it",
            fix=f"install that; or, once a TensorRT works here (dspine-export doctor), {rebuild_command(bundle)}",
        )
    if engine.builder != host.builder:
        raise DependencyError(
            "the plan was built by another library than the one that would load it",
            where=where,
            got=f"built by {built}",
            expected=str(host),
            fix=rebuild_command(bundle),
        )
    if engine.builder_version != host.version:
        raise DependencyError(
            f"the plan was built by another version of {_NAMES.get(engine.builder, engine.builder)}",
            where=where,
            got=f"built by {built}, loaded by {host}",
            expected="the same version: plans are not portable between versions",
            fix=f"{rebuild_command(bundle)}; or install version {engine.builder_version}",
        )


def _check_gpu(bundle: Bundle, engine: EngineEntry, host: PlanHost, where: Path) -> None:
    capability = host.compute_capability
    if capability is None:
        raise DependencyError(
            "no GPU to run the plan on",
            where=where,
            expected=" or ".join(engine.compute_capabilities),
            fix="use the onnxruntime or torch executor on this machine",
        )
    if not any(_covers(listed, capability) for listed in engine.compute_capabilities):
        raise DependencyError(
            "the plan was built for another GPU architecture",
            where=where,
            got=f"compute capability {capability[0]}.{capability[1]} (sm_{capability[0]}{capability[1]})",
            expected=" or ".join(engine.compute_capabilities),
            fix=f"{rebuild_command(bundle)} --set build.compute_capability={capability[0]}.{capability[1]}",
        )


def _covers(listed: str, capability: tuple[int, int]) -> bool:
    match = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})(\+?)", listed)
    if match is None:
        return False
    own = (int(match[1]), int(match[2]))
    return capability >= own if match[3] else capability == own


def _check_plugin_abi(bundle: Bundle, engine: EngineEntry, where: Path) -> None:
    """As the manifest records it."""
    from dspine_plugins import ABI_MAJOR

    if engine.plugin_abi is None:
        return
    if int(engine.plugin_abi.partition(".")[0]) != ABI_MAJOR:
        raise DependencyError(
            "the plan uses another plugin ABI major than this version of dspine-export",
            where=where,
            got=engine.plugin_abi,
            expected=f"{ABI_MAJOR}.x",
            fix=rebuild_command(bundle),
        )


def _check_plugin_library(bundle: Bundle, engine: EngineEntry) -> None:
    """As the library says itself, which runs its code: only once it is known to be the file that was built."""
    from dspine_plugins import ABI_MAJOR, load_abi

    if engine.plugin_library is None:
        return
    library = bundle.file(engine.plugin_library)
    try:
        found = load_abi(library, require_major=None)
    except DependencyError as error:  # another processor, a missing CUDA runtime, or no such library at all
        raise DependencyError(error.what, where=library, got=error.got, fix=rebuild_command(bundle)) from error
    if found.major != ABI_MAJOR:
        raise DependencyError(
            "the bundle's plugin library has another ABI major than its plan",
            where=library,
            got=f"{found.major}.{found.minor}",
            expected=f"{ABI_MAJOR}.x",
            fix=rebuild_command(bundle),
        )


def _check_hash(bundle: Bundle, path: Path, expected: str) -> None:
    digest = sha256_of(path)
    if digest != expected:
        raise VerificationError(
            "a file of the engine was changed after the build",
            where=path,
            got=f"sha256 {digest}",
            expected=f"sha256 {expected}",
            fix=f"copy the bundle again, or rebuild its engine: {rebuild_command(bundle)}",
        )
