"""Weights of a lowered graph: one safetensors file beside the ONNX files, streamed, which their initialisers point into.

The graphs hold no weight values. Tensors keep the checkpoint's names; ``token_table`` is derived here (see `passes.fold_tables`). Peak
memory is one chunk, not one model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from dspine_export.checkpoint.load import Checkpoint
from dspine_export.checkpoint.safetensors_store import torch_dtype
from dspine_export.checkpoint.target import TargetInfo
from dspine_export.errors import BuildError
from dspine_export.lowering.codes import pair_codes
from dspine_export.passes.fold_tables import CODES, MESSAGE, PREDECESSOR_GATE, TOKEN_TABLE

CHUNK_BYTES = 16 << 20
CODE_ROWS = 8192
SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class PlacedTensor:
    """Where a tensor's bytes lie: file name relative to the ONNX files, absolute offset, length in bytes."""

    file: str
    offset_bytes: int
    size_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Source:
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Tensor]]


def write_weights(
    checkpoint: Checkpoint,
    target: TargetInfo | None,
    names: Iterable[str],
    path: Path,
    dtype: torch.dtype,
    *,
    stored_names: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, PlacedTensor]:
    """Streams the named tensors, converted to `dtype`, into a new safetensors file.

    Args:
        target: needed only where transfer codes must be recomputed from its head.
        names: checkpoint tensor names, ``transfer_codes`` and ``token_table`` included.
        stored_names: what the file calls some of them; the others keep their name.

    Raises:
        CheckpointError: codes are absent and may not be recomputed. OSError: the file cannot be written.
    """
    sources = {name: _source(checkpoint, target, name) for name in sorted(names)}
    header, placed, offset = {}, {}, 0
    for name, source in sources.items():
        size = dtype.itemsize * torch.Size(source.shape).numel()
        header[stored_names.get(name, name)] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(source.shape),
            "data_offsets": [offset, offset + size],
        }
        placed[name] = PlacedTensor(path.name, offset, size, source.shape, dtype)
        offset += size
    prefix = _header_bytes(header)
    with path.open("xb") as file:
        file.write(prefix)
        for name, source in sources.items():
            written = sum(file.write(_raw(chunk.to(dtype))) for chunk in source.chunks())
            if written != placed[name].size_bytes:
                raise BuildError(
                    "A weight has the wrong size", where=name, got=written, expected=placed[name].size_bytes
                )
    base = len(prefix)
    return {n: PlacedTensor(p.file, p.offset_bytes + base, p.size_bytes, p.shape, p.dtype) for n, p in placed.items()}


def _header_bytes(header: Mapping[str, object]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    return len(text).to_bytes(8, "little") + text


def _raw(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _source(checkpoint: Checkpoint, target: TargetInfo | None, name: str) -> _Source:
    if name == TOKEN_TABLE:
        return _token_table(checkpoint, target)
    if name == CODES:
        return _codes(checkpoint, target)
    return _stored(checkpoint, name)


def _stored(checkpoint: Checkpoint, name: str) -> _Source:
    """A tensor of the checkpoint in blocks of whole rows, by ordinary reads: pages of a memory map would count as resident."""
    info = checkpoint.tensors[name]
    dtype, width = torch_dtype(info), info.shape[1:]
    row_bytes = dtype.itemsize * torch.Size(width).numel()

    def chunks() -> Iterator[Tensor]:
        for chunk in checkpoint.tensors.read_bytes(name, row_bytes * max(1, CHUNK_BYTES // row_bytes)):
            yield torch.frombuffer(chunk, dtype=dtype).view(-1, *width)

    return _Source(tuple(info.shape), chunks)


def _codes(checkpoint: Checkpoint, target: TargetInfo | None) -> _Source:
    if checkpoint.codes is not None:
        return _stored(checkpoint, checkpoint.codes.name)
    codes = pair_codes(checkpoint, target)
    assert codes is not None
    return _Source(tuple(codes.shape), lambda: codes.split(CODE_ROWS))


def _token_table(checkpoint: Checkpoint, target: TargetInfo | None) -> _Source:
    """[M ; G_p] sqrt(r) c_v for every token, products in float32. [V, 2m]"""
    codes = _codes(checkpoint, target)
    projection = torch.cat([checkpoint.tensors.read(name).float() for name in (MESSAGE, PREDECESSOR_GATE)])  # [2m, r]
    projection = projection * projection.shape[1] ** 0.5

    def chunks() -> Iterator[Tensor]:
        for rows in codes.chunks():
            yield rows.float() @ projection.T

    return _Source((codes.shape[0], projection.shape[0]), chunks)
