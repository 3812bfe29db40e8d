"""Tensors of one or several validated safetensors files, by name, read lazily through memory maps."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dspine_export.checkpoint.safetensors_header import TensorInfo, read_header
from dspine_export.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["TensorInfo", "TensorStore", "read_header", "torch_dtype"]

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64",
    "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """The torch dtype of a stored tensor; packed sub-byte formats have none and are refused."""
    import torch

    name = _TORCH_NAMES.get(info.dtype)
    if name is None:
        raise CheckpointError("Tensor dtype cannot be read", where=f"{info.path}: {info.name}", got=info.dtype)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class TensorStore(Mapping[str, TensorInfo]):
    """Name -> `TensorInfo`, plus `read`. Nothing is loaded until asked for, and the files are never written to."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self._infos = dict(infos)
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def from_files(cls, paths: list[Path]) -> TensorStore:
        """Open `paths` together; a tensor name found in two of them is refused."""
        infos: dict[str, TensorInfo] = {}
        for path in paths:
            for name, info in read_header(path).items():
                if name in infos:
                    raise CheckpointError(
                        f"Tensor {name!a} is stored twice", where=path, got=f"also in {infos[name].path.name}"
                    )
                infos[name] = info
        return cls(infos)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name` in its stored dtype, on the CPU, backed by the file where alignment allows.

        Treat it as read-only: writes stay in this process and are never seen by the file.
        """
        import torch

        info = self._infos[name]
        dtype = torch_dtype(info)
        if info.size_bytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        flat = torch.frombuffer(
            self._map(info.path), dtype=torch.uint8, count=info.size_bytes, offset=info.offset_bytes
        )
        if flat.data_ptr() % dtype.itemsize:  # legal in the format, not for a typed view
            flat = flat.clone()
        return flat.view(dtype).reshape(info.shape)

    def read_bytes(self, name: str, chunk_bytes: int = 1 << 24) -> Iterator[bytearray]:
        """Stream the raw bytes of `name` in chunks through ordinary reads, which keeps resident memory at one chunk."""
        info = self._infos[name]
        try:
            with info.path.open("rb", buffering=0) as file:
                file.seek(info.offset_bytes)
                left = info.size_bytes
                while left:
                    chunk = bytearray(min(left, chunk_bytes))
                    count = file.readinto(chunk)
                    if not count:
                        raise CheckpointError("File became shorter while it was read", where=info.path)
                    left -= count
                    yield chunk if count == len(chunk) else chunk[:count]
        except OSError as error:
            raise CheckpointError("File cannot be read", where=info.path, got=error.strerror) from None

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    # Copy-on-write: torch wants a writable buffer, and this one cannot reach the file.
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:
                raise CheckpointError("File cannot be mapped", where=path, got=error) from None
        return self._maps[path]
