"""External weights of an ONNX model, mapped and handed to the parser by address, never copied.

An initialiser may point into the drafter's safetensors file wherever that lies; parsers refuse paths outside the model's folder, and
read a truncated file without complaint. Both are settled here: lengths are compared before anything is mapped, and the parser gets
pointers into read-only maps that outlive it.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dspine_export.errors import BuildError

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True)
class ExternalWeight:
    """One initialiser stored outside the model: ``size_bytes`` at ``offset_bytes`` of ``path``."""

    name: str
    path: Path
    offset_bytes: int
    size_bytes: int


def external_weights(model: onnx.ModelProto, folder: Path) -> tuple[ExternalWeight, ...]:
    """Every external initialiser of ``model``, its location resolved against ``folder`` and its extent checked.

    Raises:
        BuildError: the data file is missing, ends before the tensor does, or the recorded length is not the tensor's.
    """
    import onnx

    found = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    return tuple(_external_weight(tensor, folder) for tensor in found)


def weight_bytes(model: onnx.ModelProto) -> int:
    """Bytes of all initialisers, external ones included: the lower bound of a plan's size."""
    return sum(_tensor_bytes(tensor) for tensor in model.graph.initializer)


def _tensor_bytes(tensor: onnx.TensorProto) -> int:
    import onnx

    return math.prod(tensor.dims) * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _external_weight(tensor: onnx.TensorProto, folder: Path) -> ExternalWeight:
    fields = {entry.key: entry.value for entry in tensor.external_data}
    path, offset, expected = folder / fields.get("location", ""), int(fields.get("offset", "0")), _tensor_bytes(tensor)
    length = int(fields.get("length", expected))
    where = f"tensor '{tensor.name}' in {path}"
    if not path.is_file():
        raise BuildError(
            "a weight file of the ONNX model is missing",
            where=where,
            expected=f"{expected} bytes at offset {offset}",
            fix="move the whole output directory, not the .onnx file alone",
        )
    if length != expected:
        raise BuildError(
            "an external tensor has the wrong length", where=where, got=f"{length} bytes", expected=f"{expected} bytes"
        )
    size = path.stat().st_size
    if offset < 0 or offset + length > size:
        raise BuildError(
            "a weight file of the ONNX model is truncated",
            where=where,
            got=f"a file of {size} bytes",
            expected=f"at least {offset + length} bytes",
            fix="copy the file again; its sha256 is in manifest.json",
        )
    return ExternalWeight(tensor.name, path.resolve(), offset, length)


class MappedWeights:
    """Read-only memory maps of weight files. Use as a context manager around parsing AND building: the builder reads the maps."""

    def __init__(self, weights: tuple[ExternalWeight, ...]) -> None:
        self._weights = weights
        self._views: dict[Path, Any] = {}

    def __enter__(self) -> MappedWeights:
        import numpy as np

        for path in {weight.path for weight in self._weights}:
            with path.open("rb") as file:
                self._views[path] = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._views.clear()  # the last reference unmaps the file

    def load_into(self, parser: Any) -> None:
        """Give the parser each tensor's address. The parser checks the size against the model once more.

        Raises:
            BuildError: the parser refuses a tensor.
        """
        for weight in self._weights:
            address = self._views[weight.path].ctypes.data + weight.offset_bytes
            if not parser.load_initializer(weight.name, address, weight.size_bytes):
                raise BuildError(
                    "the ONNX parser refused a weight",
                    where=f"tensor '{weight.name}' in {weight.path}",
                    got=f"{weight.size_bytes} bytes at offset {weight.offset_bytes}",
                )
