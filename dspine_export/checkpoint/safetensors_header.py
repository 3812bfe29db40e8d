"""The safetensors container, validated before a byte of tensor data is touched.

File = u64 little-endian header length, JSON header, data. A valid header describes the data area completely: every tensor's byte count
equals shape x dtype, and the tensors tile the area without overlap, hole or rest. Offsets need no alignment; readers copy when they must.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_export.checkpoint.bounded_json import parse_json_object, require_regular_file
from dspine_export.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 16
MAX_NAME_CHARACTERS = 1024

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

_REDOWNLOAD = "the file is damaged or was not written completely: download or save it again"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lives: safetensors dtype name, shape, file, absolute byte offset in that file and byte count."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset_bytes: int
    size_bytes: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Validate the safetensors file at `path` and return its tensors by name, in file order of their data."""
    file_size = require_regular_file(path)
    header, data_start = _read_header_json(path, file_size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("Bad __metadata__ in safetensors header", where=path, expected="an object of strings")
    infos = [_tensor_info(path, name, entry, data_start, file_size - data_start) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.offset_bytes, info.size_bytes))
    _check_tiling(path, infos, data_start, file_size)
    return {info.name: info for info in infos}


def _read_header_json(path: Path, file_size: int) -> tuple[dict[str, Any], int]:
    if file_size < 8:
        raise CheckpointError("Truncated safetensors file", where=path, got=f"{file_size} bytes", fix=_REDOWNLOAD)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            limit = min(MAX_HEADER_BYTES, file_size - 8)
            if not 2 <= length <= limit:
                raise CheckpointError(
                    "Impossible safetensors header length",
                    where=path,
                    got=f"{length} bytes",
                    expected=f"2 to {limit} bytes in a file of {file_size} bytes",
                    fix=_REDOWNLOAD + " (a pickle or an LFS pointer file also looks like this)",
                )
            data = file.read(length)
    except OSError as error:
        raise CheckpointError("File cannot be read", where=path, got=error.strerror) from None
    if len(data) != length or not data.startswith(b"{"):
        raise CheckpointError("Bad safetensors header", where=path, expected="a JSON object", fix=_REDOWNLOAD)
    return parse_json_object(data, f"{path} (safetensors header)"), 8 + length


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _tensor_info(path: Path, name: str, entry: object, data_start: int, data_size: int) -> TensorInfo:
    where = f"{path}: tensor {ascii(name)[:200]}"
    if not name or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        raise CheckpointError(
            "Bad tensor name", where=where, expected=f"1 to {MAX_NAME_CHARACTERS} printable characters"
        )
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            "Bad tensor entry in safetensors header", where=where, expected="dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            "Unknown tensor dtype", where=where, got=ascii(dtype)[:100], expected=", ".join(DTYPE_BITS)
        )
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(map(_is_count, shape)):
        raise CheckpointError(
            "Bad tensor shape", where=where, got=ascii(shape)[:200], expected="a list of non-negative integers"
        )
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(map(_is_count, offsets))
        or offsets[0] > offsets[1]
    ):
        raise CheckpointError(
            "Bad data_offsets", where=where, got=ascii(offsets)[:200], expected="[begin, end] with begin <= end"
        )
    info = TensorInfo(name, dtype, tuple(shape), path, data_start + offsets[0], offsets[1] - offsets[0])
    _check_extent(info, where, offsets[1], data_size)
    return info


def _check_extent(info: TensorInfo, where: str, end: int, data_size: int) -> None:
    if end > data_size:
        raise CheckpointError(
            "Tensor data reaches past the end of the file",
            where=where,
            got=f"data up to byte {end}",
            expected=f"at most {data_size} bytes",
            fix=_REDOWNLOAD,
        )
    bits = DTYPE_BITS[info.dtype]
    for size in info.shape:
        bits *= size
    if bits != 8 * info.size_bytes:
        raise CheckpointError(
            "Tensor size does not match its shape and dtype",
            where=where,
            got=f"{info.size_bytes} bytes",
            expected=f"{info.dtype} {list(info.shape)}",
        )


def _check_tiling(path: Path, infos: list[TensorInfo], data_start: int, file_size: int) -> None:
    position = data_start
    for info in infos:
        if info.offset_bytes != position:
            problem = "overlaps the tensor before it" if info.offset_bytes < position else "leaves a hole before it"
            raise CheckpointError(
                f"Tensor {info.name!a} {problem}", where=path, got=info.offset_bytes, expected=position, fix=_REDOWNLOAD
            )
        position += info.size_bytes
    if position != file_size:
        raise CheckpointError(
            "Bytes after the last tensor", where=path, got=f"{file_size - position} extra bytes", fix=_REDOWNLOAD
        )
