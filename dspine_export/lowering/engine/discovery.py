"""Which TensorRT can build here: TensorRT, TensorRT-RTX, neither, or one that is installed but cannot work.

Three broken installations are common enough to be recognised by name instead of surfacing as an import traceback or a dead process:

* the public ``tensorrt-cu13`` packages are stubs that fetch the libraries from another index; where that index is out of reach only
  the Python bindings remain, and their import stops at a missing ``libnvinfer`` or ``libnvonnxparser``;
* a front package without the bindings, or bindings without the front package;
* the TensorRT-RTX wheel's ONNX parser opens ``libtensorrt_rtx.so`` when it meets a plugin, but the wheel carries only
  ``libtensorrt_rtx.so.1``: the whole process aborts. `repair_rtx_library_link` adds the missing link.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

from dspine_export.errors import DependencyError, UsageError
from dspine_export.lowering.engine.full_precision import rule_out_tf32

BuilderName = Literal["tensorrt", "tensorrt-rtx"]
BUILDERS: tuple[BuilderName, ...] = ("tensorrt", "tensorrt-rtx")

_MODULES: dict[str, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_INSTALL: dict[str, str] = {
    "tensorrt": "install TensorRT 10.14 or newer with its libraries (NVIDIA's container, tar file, or NVIDIA's own package index)",
    "tensorrt-rtx": 'install the extra: pip install "dspine-export[rtx]"',
}
_RTX_LIBS = "tensorrt_rtx_libs"
_RTX_LINK = "libtensorrt_rtx.so"


@dataclass(frozen=True)
class Installation:
    """One builder as found on this machine. ``problem`` is None when it can be used; ``module`` is set exactly then."""

    name: BuilderName
    version: str | None
    module: ModuleType | None
    problem: str | None = None
    fix: str | None = None

    @property
    def usable(self) -> bool:
        return self.module is not None


def discover(name: BuilderName) -> Installation:
    """Import one builder, or say precisely why it cannot be used. Never raises and never lets the process abort.

    Sets ``NVIDIA_TF32_OVERRIDE=0`` before the import unless the user has set it: see `full_precision`.
    """
    module_name = _MODULES[name]
    if importlib.util.find_spec(module_name) is None:
        if importlib.util.find_spec(f"{module_name}_bindings") is not None:
            return _stub(
                name, f"only the bindings package ({module_name}_bindings) is installed, without {module_name} itself"
            )
        return Installation(name, None, None, f"{name} is not installed", _INSTALL[name])
    if name == "tensorrt-rtx":
        try:
            repair_rtx_library_link()
        except DependencyError as error:
            return Installation(name, None, None, error.what, error.fix)
    rule_out_tf32()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # by its age, a broken wheel raises ImportError, OSError or RuntimeError
        return _stub(name, f"import {module_name} failed: {error}")
    missing = [part for part in ("Builder", "OnnxParser", "__version__") if not hasattr(module, part)]
    if missing:
        return _stub(name, f"the module {module_name} has no {', '.join(missing)}")
    return Installation(name, str(module.__version__), module)


def select(builder: str = "auto") -> Installation:
    """The builder to use.

    ``auto`` takes TensorRT where it works and a GPU is present (its builder measures kernels on the device), else TensorRT-RTX, which
    builds without one.

    Raises:
        UsageError: an unknown name.
        DependencyError: the named builder, or every builder, is missing or broken; each one's reason and remedy is listed.
    """
    if builder not in ("auto", *BUILDERS):
        raise UsageError("unknown engine builder", got=builder, expected=", ".join(("auto", *BUILDERS)))
    if builder != "auto":
        found = discover(builder)  # type: ignore[arg-type]  # narrowed by the check above
        if found.usable:
            return found
        raise DependencyError(f"cannot build engines with {builder}: {found.problem}", fix=found.fix)

    from dspine_export.lowering.engine.gpu import device_compute_capability

    candidates = [discover(name) for name in BUILDERS]
    usable = [found for found in candidates if found.usable]
    if len(usable) > 1 and device_compute_capability() is None:
        usable = [found for found in usable if found.name == "tensorrt-rtx"]
    if usable:
        return usable[0]
    raise DependencyError(
        "no usable TensorRT is installed",
        got="; ".join(f"{found.name}: {found.problem}" for found in candidates),
        expected=" or ".join(BUILDERS),
        fix=f"{_INSTALL['tensorrt-rtx']}; or stop before the engine with --stop-after onnx",
    )


def rtx_library_directory() -> Path | None:
    """The folder of TensorRT-RTX's shared libraries, without loading them; None when its wheel is not installed."""
    spec = importlib.util.find_spec(_RTX_LIBS)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def rtx_library_link_missing(directory: Path | None = None) -> bool:
    """Whether the link exists that TensorRT-RTX's parser opens; without it the first plugin aborts the process."""
    directory = directory or rtx_library_directory()
    return directory is not None and any(directory.glob(f"{_RTX_LINK}.*")) and not (directory / _RTX_LINK).exists()


def repair_rtx_library_link(directory: Path | None = None) -> bool:
    """Create the missing ``libtensorrt_rtx.so`` beside its versioned file; True when something was created.

    Safe to call at any time and from several processes at once. ``doctor`` calls it, and so does every build.

    Raises:
        DependencyError: the folder is not writable; the message holds the command to run with sufficient rights.
    """
    directory = directory or rtx_library_directory()
    if directory is None or not rtx_library_link_missing(directory):
        return False
    link, target = directory / _RTX_LINK, sorted(directory.glob(f"{_RTX_LINK}.*"))[0].name
    try:
        os.symlink(target, link)
    except FileExistsError:  # another process was faster, or a dangling link is in the way
        if link.exists():
            return False
        link.unlink()
        os.symlink(target, link)
    except OSError as error:
        raise DependencyError(
            f"TensorRT-RTX's parser needs {_RTX_LINK} and the package does not contain it: {error.strerror}",
            where=directory,
            fix=f"ln -s {target} {link}",
        ) from error
    return True


def _stub(name: BuilderName, detail: str) -> Installation:
    what = f"{name} is installed without its libraries (a stub package): {detail}"
    return Installation(name, None, None, what, f"{_INSTALL[name]}, or remove the stub")
