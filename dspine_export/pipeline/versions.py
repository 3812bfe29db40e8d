"""Versions of everything that shapes an artefact."""

from __future__ import annotations

import importlib.metadata
import platform

from dspine_export.version import __version__

_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "tensorrt", "tensorrt-cu13", "tensorrt-rtx-cu13")


def collect_versions() -> dict[str, str]:
    """Name -> version of this package, Python, and the installed ones among those that matter."""
    versions = {"dspine-export": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
