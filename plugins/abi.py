"""Reads the record that a built plugin library exports about itself (`include/dspine/abi.h`), without TensorRT or a GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from dspine_export.errors import DependencyError

ABI_MAJOR = 1
"""ABI major that this version of the package writes engines for; equals DSPINE_ABI_MAJOR of the C header."""

_REBUILD = "rebuild it with this version: dspine_plugins.build_plugins(directory)"


@dataclass(frozen=True)
class PluginAbi:
    """What a plugin library says about itself.

    `architectures` are the compute capabilities it holds machine code for ("90" is sm_90); devices beyond them run its PTX.
    `tensorrt_headers` is the (major, minor) it was compiled against; it runs under that major and later ones.
    `source_hash` is empty for libraries that CMake built by hand.
    """

    major: int
    minor: int
    version: str
    tensorrt_headers: tuple[int, int]
    architectures: tuple[str, ...]
    source_hash: str


class _Record(ctypes.Structure):
    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("abi_major", ctypes.c_int32),
        ("abi_minor", ctypes.c_int32),
        ("tensorrt_header_major", ctypes.c_int32),
        ("tensorrt_header_minor", ctypes.c_int32),
        ("version", ctypes.c_char_p),
        ("architectures", ctypes.c_char_p),
        ("source_hash", ctypes.c_char_p),
    )


def load_abi(path: str | Path, *, require_major: int | None = ABI_MAJOR) -> PluginAbi:
    """Loads a plugin library into this process and returns its record.

    Args:
        path: `libdspine_trt_plugins.so`.
        require_major: ABI major to insist on; None accepts any that this reader understands.

    Raises:
        DependencyError: the file cannot be loaded, is no DSpine plugin library, or was built for another ABI major.
    """
    path = Path(path)
    if not path.is_file():
        raise DependencyError(
            "plugin library not found", where=path, fix="build it: dspine_plugins.build_plugins(directory)"
        )
    try:
        library = ctypes.CDLL(str(path.resolve()))
        export = library.dspine_plugins_abi
    except OSError as error:
        raise DependencyError("plugin library cannot be loaded", where=path, got=error, fix=_REBUILD) from error
    except AttributeError as error:
        raise DependencyError(
            "not a DSpine plugin library",
            where=path,
            got="no symbol dspine_plugins_abi",
            expected="libdspine_trt_plugins.so",
        ) from error
    export.restype = ctypes.POINTER(_Record)
    export.argtypes = []
    record = export().contents
    _check_major(path, record.abi_major, require_major)
    if record.struct_bytes < ctypes.sizeof(_Record):
        raise DependencyError("plugin library has an older record than its ABI major allows", where=path, fix=_REBUILD)
    return PluginAbi(
        major=record.abi_major,
        minor=record.abi_minor,
        version=record.version.decode(),
        tensorrt_headers=(record.tensorrt_header_major, record.tensorrt_header_minor),
        architectures=tuple(record.architectures.decode().split(",")),
        source_hash=record.source_hash.decode(),
    )


def _check_major(path: Path, major: int, required: int | None) -> None:
    if required is not None and major != required:
        raise DependencyError(
            "plugin library was built for another ABI major", where=path, got=major, expected=required, fix=_REBUILD
        )
