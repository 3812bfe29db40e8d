"""Builds the plugin libraries with CMake and nvcc, and finds ones that were built.

A build is cached per source hash, architectures, headers and compiler under the user's cache directory, so that a second bundle
costs a file copy.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dspine_plugins.abi import PluginAbi, load_abi
from dspine_plugins.toolchain import Toolchain, find_toolchain, select_architectures

from dspine_export.errors import BuildError
from dspine_export.version import __version__

LIBRARY_NAME = "libdspine_trt_plugins.so"
AUTOREG_NAME = "libdspine_trt_autoreg.so"
HARNESS_NAME = "libdspine_harness.so"
LIBRARY_VARIABLE = "DSPINE_PLUGIN_LIBRARY"

_SOURCE_ROOT = Path(__file__).resolve().parent
_LOG_LINES = 40


@dataclass(frozen=True)
class PluginLibrary:
    """A built plugin library: `path` for `IPluginRegistry::loadLibrary`, `autoreg` for hosts that only dlopen, and its ABI record."""

    path: Path
    autoreg: Path | None
    abi: PluginAbi


def build_plugins(
    output_dir: str | Path,
    tensorrt_root: str | Path | None = None,
    archs: Iterable[str | int] | None = None,
    *,
    harness: bool = False,
) -> PluginLibrary:
    """Builds `libdspine_trt_plugins.so` and `libdspine_trt_autoreg.so` into `output_dir`.

    Args:
        output_dir: created if needed; files of the same names are replaced atomically.
        tensorrt_root: directory of the TensorRT headers; see `toolchain.find_headers` for the default.
        archs: compute capabilities; see `toolchain.select_architectures` for the default.
        harness: also build `libdspine_harness.so`, with which `tools/check_plugins_gpu.py` runs the plugins.

    Raises:
        DependencyError: nvcc, CMake or the headers are missing.
        UsageError: an unsupported architecture.
        BuildError: the compiler failed; the message carries the end of its log.
    """
    architectures = select_architectures(archs)
    toolchain = find_toolchain(tensorrt_root)
    cached = _cached_build(toolchain, architectures, harness)
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for library in sorted(cached.glob("*.so")):
        _copy_atomically(library, output_dir / library.name)
    return _library_in(output_dir)


def find_plugins(directory: str | Path | None = None) -> PluginLibrary | None:
    """Returns a built library, or None.

    Order: `directory` alone when given; otherwise the file named by DSPINE_PLUGIN_LIBRARY, then the newest cached build of the
    present sources.

    Raises:
        DependencyError: a library is there but unusable, for example built for another ABI major.
    """
    if directory is not None:
        return _library_in(Path(directory)) if (Path(directory) / LIBRARY_NAME).is_file() else None
    if os.environ.get(LIBRARY_VARIABLE):
        path = Path(os.environ[LIBRARY_VARIABLE])
        return PluginLibrary(path, _autoreg_beside(path), load_abi(path))
    builds = [path.parent for path in _cache_root().glob(f"{source_hash()[:16]}-*/{LIBRARY_NAME}")]
    return _library_in(max(builds, key=lambda path: path.stat().st_mtime)) if builds else None


def source_hash() -> str:
    """Returns the SHA-256 of everything that ends up in the libraries, the package version included."""
    digest = hashlib.sha256(__version__.encode())
    for path in _sources():
        digest.update(f"\0{path.relative_to(_SOURCE_ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    yield _SOURCE_ROOT / "CMakeLists.txt"
    for folder in ("harness", "include", "src"):
        yield from sorted(
            path for path in (_SOURCE_ROOT / folder).rglob("*") if path.suffix in {".cpp", ".cu", ".cuh", ".h"}
        )


def _cached_build(toolchain: Toolchain, architectures: tuple[str, ...], harness: bool) -> Path:
    from filelock import FileLock

    setting = "\0".join((*architectures, str(toolchain.headers), toolchain.compiler, str(harness)))
    key = f"{source_hash()[:16]}-{hashlib.sha256(setting.encode()).hexdigest()[:16]}"
    target = _cache_root() / key
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not (target / LIBRARY_NAME).is_file():
            _compile(toolchain, architectures, harness, target)
    return target


def _compile(toolchain: Toolchain, architectures: tuple[str, ...], harness: bool, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
        tree = Path(scratch) / "tree"
        configure = [str(toolchain.cmake), "-S", str(_SOURCE_ROOT), "-B", str(tree)]
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja}"] if toolchain.ninja else []
        configure += [
            f"-DCMAKE_CUDA_COMPILER={toolchain.nvcc}",
            f"-DTENSORRT_ROOT={toolchain.headers}",
            f"-DDSPINE_CUDA_ARCHS={';'.join(architectures)}",
            f"-DDSPINE_VERSION_STRING={__version__}",
            f"-DDSPINE_SOURCE_HASH={source_hash()}",
            f"-DDSPINE_HARNESS={'ON' if harness else 'OFF'}",
        ]
        _run(configure, "configuring the plugins failed")
        _run(
            [str(toolchain.cmake), "--build", str(tree), "--parallel", str(os.cpu_count() or 1)],
            "compiling the plugins failed",
        )
        finished = Path(scratch) / "finished"
        finished.mkdir()
        for library in tree.glob("*.so"):
            shutil.move(str(library), str(finished / library.name))
        load_abi(finished / LIBRARY_NAME)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(finished, target)


def _run(command: list[str], failure: str) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode != 0:
        log = "\n    ".join(result.stdout.strip().splitlines()[-_LOG_LINES:])
        raise BuildError(failure, where=" ".join(command), got=f"exit status {result.returncode}\n    {log}")


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dspine-export" / "plugins"


def _copy_atomically(source: Path, target: Path) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        shutil.copy(source, name)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def _library_in(directory: Path) -> PluginLibrary:
    path = directory / LIBRARY_NAME
    return PluginLibrary(path, _autoreg_beside(path), load_abi(path))


def _autoreg_beside(path: Path) -> Path | None:
    autoreg = path.with_name(AUTOREG_NAME)
    return autoreg if autoreg.is_file() else None
