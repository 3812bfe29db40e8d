"""The plugin library and what it takes to build it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dspine_export.doctor.check import Check
from dspine_export.doctor.probe import first_line_of


def check_compilers() -> list[Check]:
    """nvcc and CMake, needed only to build the plugin library."""
    checks = []
    for name, fix in (("nvcc", "install the CUDA toolkit (13.0 or newer)"), ("cmake", "pip install cmake")):
        path = shutil.which(name)
        if path is None:
            checks.append(Check(name, "absent", "not on PATH; needed to build the plugin library", fix))
            continue
        lines = first_line_of([path, "--version"]) if name == "cmake" else _nvcc_release(path)
        checks.append(Check(name, "ok", f"{lines or 'of unknown version'} ({path})"))
    return checks


def check_headers() -> list[Check]:
    """TensorRT's headers: those of ``TENSORRT_ROOT``, else the ones inside the package kernel-lens."""
    root = os.environ.get("TENSORRT_ROOT")
    if root:
        if (Path(root) / "include" / "NvInfer.h").is_file():
            return [Check("TensorRT headers", "ok", f"TENSORRT_ROOT {root}")]
        return [
            Check(
                "TensorRT headers",
                "broken",
                f"TENSORRT_ROOT {root} has no include/NvInfer.h",
                "unset or correct TENSORRT_ROOT",
            )
        ]
    found = _packaged_headers()
    if found:
        return [Check("TensorRT headers", "ok", str(found))]
    fix = "set TENSORRT_ROOT, or pip install --no-deps kernel-lens==2.0.1"
    return [Check("TensorRT headers", "absent", "not found; needed to build the plugin library", fix)]


def check_tritonserver() -> list[Check]:
    """The tritonserver program."""
    path = shutil.which("tritonserver")
    if path is None:
        return [Check("tritonserver", "absent", "not on PATH", "needed only to serve with Triton Inference Server")]
    return [Check("tritonserver", "ok", path)]


def _nvcc_release(path: str) -> str | None:
    import subprocess

    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return next((line.strip() for line in output.splitlines() if "release" in line), None)


def _packaged_headers() -> Path | None:
    import importlib.util

    spec = importlib.util.find_spec("kernel_lens")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        include = Path(folder) / "include" / "tensorrt"
        if (include / "NvInfer.h").is_file():
            return include
    return None
