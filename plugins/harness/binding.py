"""ctypes binding of `libdspine_harness.so`, which drives real IPluginV3 objects the way TensorRT does."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dspine_export.errors import DependencyError

# nvinfer1::DataType
TYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.int32: 3, torch.bfloat16: 7, torch.int64: 8}


class HarnessError(RuntimeError):
    """A plugin refused a call; the message names which."""


class _TensorRecord(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 4),
    )


def _records(tensors: Sequence[Tensor]) -> ctypes.Array[_TensorRecord]:
    records = (_TensorRecord * len(tensors))()
    for record, tensor in zip(records, tensors, strict=True):
        if not tensor.is_contiguous():
            raise HarnessError("operands must be contiguous")
        record.data, record.type, record.rank = tensor.data_ptr(), TYPE_CODES[tensor.dtype], tensor.ndim
        record.dims[: tensor.ndim] = tensor.shape
    return records


class HarnessPlugin:
    """One plugin object, already serialised, created again and cloned; a context manager that deletes it.

    Operands are passed in the order of the operator schema. `configure` may take tensors on any device, `enqueue` needs CUDA ones.
    """

    def __init__(self, harness: Path, library: Path, op: str, attributes: Mapping[str, float]) -> None:
        self._functions = _load(harness)
        names = (ctypes.c_char_p * len(attributes))(*(name.encode() for name in attributes))
        values = (ctypes.c_float * len(attributes))(*attributes.values())
        self._handle = self._functions.dspine_harness_create(
            str(library).encode(), op.encode(), len(attributes), names, values
        )
        if not self._handle:
            raise HarnessError(f"{op}: {self._functions.dspine_harness_error().decode()}")

    def __enter__(self) -> HarnessPlugin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._functions.dspine_harness_destroy(self._handle)

    def refused_operand(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int | None:
        """Position of the first operand whose type the plugin refuses, or None."""
        position = self._functions.dspine_harness_refused(
            self._handle, _records(inputs), len(inputs), _records(outputs), len(outputs)
        )
        return None if position < 0 else int(position)

    def configure(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        """Makes every call that comes before execution and returns the workspace size in bytes."""
        size = self._functions.dspine_harness_configure(
            self._handle, _records(inputs), len(inputs), _records(outputs), len(outputs)
        )
        if size < 0:
            raise HarnessError(self._functions.dspine_harness_error().decode())
        return int(size)

    def enqueue(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: Tensor, stream: int) -> None:
        """Launches on the CUDA stream with handle `stream`; asynchronous."""
        status = self._functions.dspine_harness_enqueue(
            self._handle, _records(inputs), len(inputs), _records(outputs), len(outputs), workspace.data_ptr(), stream
        )
        if status != 0:
            raise HarnessError("enqueue failed; the reason is on stderr")


def _load(path: Path) -> ctypes.CDLL:
    if not path.is_file():
        raise DependencyError(
            "GPU harness not found",
            where=path,
            fix="python -m dspine_plugins DIRECTORY --harness, on a machine with nvcc",
        )
    library = ctypes.CDLL(str(path.resolve()))
    tensors, count = ctypes.POINTER(_TensorRecord), ctypes.c_int32
    library.dspine_harness_error.restype = ctypes.c_char_p
    library.dspine_harness_create.restype = ctypes.c_void_p
    library.dspine_harness_create.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        count,
        ctypes.POINTER(ctypes.c_char_p),
        ctypes.POINTER(ctypes.c_float),
    ]
    library.dspine_harness_destroy.argtypes = [ctypes.c_void_p]
    operands: list[Any] = [ctypes.c_void_p, tensors, count, tensors, count]
    library.dspine_harness_refused.argtypes = operands
    library.dspine_harness_configure.argtypes = operands
    library.dspine_harness_configure.restype = ctypes.c_int64
    library.dspine_harness_enqueue.argtypes = [*operands, ctypes.c_void_p, ctypes.c_void_p]
    return library
