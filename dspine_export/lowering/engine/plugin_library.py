"""Loads the DSpine plugin library into the builder's registry, once per process, and refuses anything else with a reason.

The library exports ``getCreators`` and makes no registry call, so one binary serves TensorRT 10 and 11. Loading goes through
``registry.load_library``; the autoreg shim is for hosts that only dlopen and must not be given here.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType
from typing import Any

from dspine_export.errors import DependencyError
from dspine_export.ops_schema import DOMAIN, OPS, VERSION

LIBRARY_NAME = "libdspine_trt_plugins.so"

_loaded: set[tuple[str, Path]] = set()
_handles: list[Any] = []  # the registry's; never released, for engines may outlive every caller


def load_plugin_library(trt: ModuleType, path: Path, *, tensorrt_major: int) -> None:
    """Register the creators of ``path`` with ``trt``'s plugin registry; a second call with the same file does nothing.

    Args:
        trt: the builder's or runtime's module.
        path: ``libdspine_trt_plugins.so``.
        tensorrt_major: of the host's plugin interface (11 for TensorRT-RTX 1.7).

    Raises:
        DependencyError: the file is missing, cannot be opened, is no DSpine plugin library, was built for another ABI major or for a
            later TensorRT than the host's, or lacks one of the operators of `ops_schema.OPS`.
    """
    real = path.resolve()
    if (trt.__name__, real) in _loaded:
        return
    _check_library(real, tensorrt_major)
    if missing_creators(trt):
        _handles.append(_load(trt, real))
    missing = missing_creators(trt)
    if missing:
        raise DependencyError(
            "the plugin library does not provide every DSpine operator",
            where=real,
            got=f"no creator for {', '.join(missing)}",
            expected=", ".join(f"{DOMAIN}::{op.op_type} version {VERSION}" for op in OPS),
            fix=f"rebuild {LIBRARY_NAME} from plugins/ of this version of dspine-export",
        )
    _loaded.add((trt.__name__, real))


def missing_creators(trt: ModuleType) -> list[str]:
    """Operator names that the registry of ``trt`` has no creator for."""
    registry = trt.get_plugin_registry()
    return [op.op_type for op in OPS if registry.get_creator(op.op_type, str(VERSION), DOMAIN) is None]


def _check_library(path: Path, tensorrt_major: int) -> None:
    """The registry's own failures name no cause, so the file is opened and questioned first."""
    from dspine_plugins.abi import load_abi

    abi = load_abi(path)
    if abi.tensorrt_headers[0] > tensorrt_major:
        raise DependencyError(
            "the plugin library was built for a later TensorRT than this one",
            where=path,
            got=f"headers of TensorRT {'.'.join(map(str, abi.tensorrt_headers))}",
            expected=f"major {tensorrt_major} or earlier",
            fix="rebuild it with the headers of this TensorRT: python -m dspine_plugins DIRECTORY --tensorrt-root ROOT",
        )
    if not hasattr(ctypes.CDLL(str(path)), "getCreators"):
        raise DependencyError(
            "the library exports no plugin creators",
            where=path,
            got="no symbol getCreators",
            expected=LIBRARY_NAME,
            fix=f"pass {LIBRARY_NAME} itself, not the autoreg shim beside it",
        )


def _load(trt: ModuleType, path: Path) -> Any:
    try:
        handle = trt.get_plugin_registry().load_library(str(path))
    except Exception as error:  # bindings differ: some raise, some return None
        raise _refused(trt, path, str(error)) from error
    if handle is None:
        raise _refused(trt, path, "the registry returned nothing")
    return handle


def _refused(trt: ModuleType, path: Path, reason: str) -> DependencyError:
    return DependencyError(
        f"{trt.__name__} {trt.__version__} refused the plugin library",
        where=path,
        got=reason,
        expected="IPluginV3 creators built with TensorRT 10 or 11 headers, none of them registered before",
        fix="rebuild it with the headers of this TensorRT: python -m dspine_plugins DIRECTORY --tensorrt-root ROOT",
    )
