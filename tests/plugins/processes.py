"""Runs scripts in processes of their own: loading plugins cannot be undone, and some ways of loading them crash.

Also compiles the small libraries that those scripts load.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from dspine_plugins.toolchain import find_headers

HERE = Path(__file__).parent


def run_python(
    script: str, *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a script text with arguments and returns what it printed."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=300, preexec_fn=_no_core_file
    )


def _no_core_file() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def compile_library(source: Path, library: Path, *flags: str) -> Path:
    """A shared library of one C++ file, with the TensorRT headers installed here unless `flags` put others before them."""
    cuda = Path(subprocess.run(["which", "nvcc"], capture_output=True, text=True, check=True).stdout.strip())
    includes = [find_headers(), cuda.resolve().parents[1] / "include", Path("/usr/local/cuda/include")]
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-w", *flags]
    command += [flag for include in includes if include.is_dir() for flag in ("-isystem", str(include))]
    subprocess.run([*command, str(source), "-o", str(library), "-ldl"], check=True)
    return library
