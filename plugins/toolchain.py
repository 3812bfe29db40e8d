"""Finds what a plugin build needs: nvcc, CMake, a build tool, TensorRT headers, and the GPU architectures to compile for."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dspine_export.errors import DependencyError, UsageError

DEFAULT_ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
ARCHITECTURES_VARIABLE = "DSPINE_PLUGIN_ARCHS"
_LEAST_ARCHITECTURE = 80
_LEAST_TENSORRT_MAJOR = 10
_HEADER = "NvInferRuntime.h"
_HEADER_FIX = "pip install kernel-lens==2.0.1 (it carries TensorRT 10.14 headers), or set TENSORRT_ROOT"
_SYSTEM_INCLUDES = (
    "/usr/include",
    "/usr/include/x86_64-linux-gnu",
    "/usr/include/aarch64-linux-gnu",
    "/usr/local/tensorrt/include",
)


@dataclass(frozen=True)
class Toolchain:
    """Absolute paths of the tools, the TensorRT include directory, and a line that identifies the compiler."""

    nvcc: Path
    cmake: Path
    ninja: Path | None
    headers: Path
    compiler: str


def find_toolchain(tensorrt_root: str | Path | None = None) -> Toolchain:
    """Locates every tool.

    Raises:
        DependencyError: one is missing; the message names what to install.
    """
    nvcc = _require("nvcc", "install the CUDA toolkit 12.8 or later, or set CUDA_HOME", _cuda_bin())
    cmake = _require("cmake", "pip install 'cmake>=3.22'")
    ninja = shutil.which("ninja")
    if ninja is None:
        _require("make", "pip install ninja")
    return Toolchain(nvcc, cmake, Path(ninja) if ninja else None, find_headers(tensorrt_root), _compiler_line(nvcc))


def find_headers(tensorrt_root: str | Path | None = None) -> Path:
    """Returns the directory of NvInferRuntime.h (TensorRT 10 or later).

    Order: the argument, TENSORRT_ROOT, the kernel-lens package, the system's include directories. A place named explicitly must
    have the header; it is never silently replaced by another one.

    Raises:
        DependencyError: no headers, or headers of a TensorRT before 10.
    """
    explicit = tensorrt_root or os.environ.get("TENSORRT_ROOT")
    for directory in _explicit_places(Path(explicit)) if explicit else _implicit_places():
        if (directory / _HEADER).is_file():
            _check_header_version(directory)
            return directory.resolve()
    raise DependencyError(
        "TensorRT headers not found", where=explicit, expected=f"{_HEADER}, itself or under include/", fix=_HEADER_FIX
    )


def select_architectures(architectures: Iterable[str | int] | None = None) -> tuple[str, ...]:
    """Returns ascending compute capabilities such as ("80", "90").

    Order: the argument, the environment variable DSPINE_PLUGIN_ARCHS ("90" or "80,90"), the GPUs of this machine, all that the
    plugins support.

    Raises:
        UsageError: not a number, or one below 80 (the kernels need bfloat16 tensor cores).
    """
    chosen: Iterable[str | int] | None = architectures
    if chosen is None and os.environ.get(ARCHITECTURES_VARIABLE):
        chosen = re.split(r"[,; ]+", os.environ[ARCHITECTURES_VARIABLE].strip())
    if chosen is None:
        chosen = _local_architectures() or DEFAULT_ARCHITECTURES
    numbers = sorted({_architecture_number(str(item)) for item in chosen})
    if not numbers:
        raise UsageError("no GPU architecture to build for", expected="for example ['90']")
    return tuple(str(number) for number in numbers)


def _architecture_number(text: str) -> int:
    number = int(text.replace(".", "")) if re.fullmatch(r"\d+(\.\d)?", text) else 0
    if number < _LEAST_ARCHITECTURE:
        raise UsageError(
            "unsupported GPU architecture",
            got=repr(text),
            expected="a compute capability of 80 or later, such as 90",
            fix="the kernels need bfloat16 tensor cores, which came with sm_80",
        )
    return number


def _local_architectures() -> tuple[str, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    found = [line.strip() for line in result.stdout.splitlines() if re.fullmatch(r"\d+\.\d", line.strip())]
    return tuple(sorted({cap.replace(".", "") for cap in found if float(cap) >= _LEAST_ARCHITECTURE / 10}))


def _require(tool: str, fix: str, extra_path: str | None = None) -> Path:
    found = (extra_path and shutil.which(tool, path=extra_path)) or shutil.which(tool)
    if found is None:
        raise DependencyError(f"{tool} not found", expected=f"{tool} on PATH", fix=fix)
    return Path(found)


def _cuda_bin() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return str(Path(home) / "bin") if home else "/usr/local/cuda/bin"


def _compiler_line(nvcc: Path) -> str:
    result = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise DependencyError("nvcc does not run", where=nvcc, got=result.stderr.strip()[-300:])
    return result.stdout.strip().splitlines()[-1]


def _explicit_places(root: Path) -> Iterator[Path]:
    yield root
    yield root / "include"


def _implicit_places() -> Iterator[Path]:
    package = importlib.util.find_spec("kernel_lens")
    if package is not None and package.origin is not None:
        yield Path(package.origin).parent / "include" / "tensorrt"
    yield from map(Path, _SYSTEM_INCLUDES)


def _check_header_version(directory: Path) -> None:
    version = directory / "NvInferVersion.h"
    text = version.read_text(encoding="utf-8", errors="replace") if version.is_file() else ""
    major = re.search(r"#define\s+(?:NV_TENSORRT_MAJOR|TRT_MAJOR_ENTERPRISE)\s+(\d+)", text)
    rtx = "TRT_MAJOR_RTX" in text
    if not rtx and (major is None or int(major[1]) < _LEAST_TENSORRT_MAJOR):
        raise DependencyError(
            "TensorRT headers are too old",
            where=directory,
            got=f"TensorRT {major[1]}" if major else "no version",
            expected=f"TensorRT {_LEAST_TENSORRT_MAJOR} or later",
            fix=_HEADER_FIX,
        )
