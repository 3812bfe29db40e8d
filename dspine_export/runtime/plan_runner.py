"""One deserialised plan with torch CUDA tensors as its buffers, on torch's current stream.

Executed on an H200 with TensorRT-RTX 1.6.1 and plugin-free graphs (tools/results/plan_portable_h200.json); never with plugins there.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspine_export.errors import DependencyError, DspineWarning, UsageError
from dspine_export.lowering.engine.backend import Backend
from dspine_export.lowering.engine.full_precision import tf32_warning

# Member of the bindings' DataType -> torch. Strings, because the module is known only at run time.
_DTYPES = {
    "FLOAT": torch.float32,
    "BF16": torch.bfloat16,
    "HALF": torch.float16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "BOOL": torch.bool,
}
_REBUILD = "build the engine on this machine: dspine-export build --resume BUNDLE"


class PlanRunner:
    """Feeds tensors by name and returns tensors by name; feeds the plan does not know are ignored, graphs drop unused inputs.

    A run that a CUDA graph captures leaves its execution context to that graph, with the context's memory: a graph is valid as long as
    nobody changes the context it was captured from. Run the shapes once before they are captured; the library prepares itself then.

    Args:
        runtime: kept alive as long as the engine made by it.
    """

    def __init__(self, backend: Backend, runtime: Any, engine: Any, device: torch.device) -> None:
        self._backend, self._runtime, self._engine, self._device = backend, runtime, engine, device
        self._context = self._new_context()
        self._captured: list[Any] = []
        mode = backend.module.TensorIOMode
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.dtypes = {name: _DTYPES[engine.get_tensor_dtype(name).name] for name in names}
        self.inputs = tuple(name for name in names if engine.get_tensor_mode(name) == mode.INPUT)
        self.outputs = tuple(name for name in names if engine.get_tensor_mode(name) == mode.OUTPUT)

    def run(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Enqueues one execution; outputs are fresh tensors, ready in stream order.

        Inputs may be freed by the caller right away: torch's allocator reuses memory in the order of the same stream.

        Raises:
            UsageError: a shape outside the plan's profile. DependencyError: the library refuses to execute.
        """
        context = self._context = self._new_context() if self._context is None else self._context
        bound = {name: self._input(name, feeds) for name in self.inputs}
        for name, tensor in bound.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise self._outside(name, tensor)
            context.set_tensor_address(name, tensor.data_ptr())
        unknown = context.infer_shapes()
        if unknown:
            raise DependencyError("The plan does not determine every shape", where=str(self._backend), got=unknown)
        results = {}
        for name in self.outputs:
            shape = tuple(context.get_tensor_shape(name))
            results[name] = torch.empty(shape, dtype=self.dtypes[name], device=self._device)
            context.set_tensor_address(name, results[name].data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream(self._device).cuda_stream):
            raise DependencyError(f"{self._backend} could not execute the plan", got=self._backend.log.excerpt())
        if self._is_captured():
            self._captured.append(context)
            self._context = None
        return results

    def _is_captured(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _new_context(self) -> Any:
        context = self._engine.create_execution_context()
        if context is None:
            raise DependencyError(
                f"{self._backend} cannot create an execution context", got=self._backend.log.excerpt()
            )
        return context

    def _input(self, name: str, feeds: Mapping[str, Tensor]) -> Tensor:
        tensor = feeds[name]
        if tensor.dtype != self.dtypes[name] or tensor.device.type != self._device.type:
            got, expected = f"{tensor.dtype} on {tensor.device}", f"{self.dtypes[name]} on {self._device}"
            raise UsageError("A tensor does not fit the plan", where=name, got=got, expected=expected)
        return tensor.contiguous()

    def _outside(self, name: str, tensor: Tensor) -> UsageError:
        least, _, most = (tuple(shape) for shape in self._engine.get_tensor_profile_shape(name, 0))
        fix = "build the engine with larger --max-batch-size or --max-seq-len"
        expected = f"{least} .. {most}"
        return UsageError(
            "A shape is outside the plan's profile", where=name, got=tuple(tensor.shape), expected=expected, fix=fix
        )


def load_plan(backend: Backend, path: Path, device: torch.device, *, host_code: bool = False) -> PlanRunner:
    """Deserialises a plan that `plan_check` has passed. Warns where the environment lets float32 products be rounded to TF32.

    Args:
        host_code: the plan carries its plugin library, which the runtime must be told to accept.

    Raises:
        DependencyError: the library refuses it; its own words are quoted.
    """
    doubt = tf32_warning()
    if doubt is not None:
        warnings.warn(doubt, DspineWarning, stacklevel=2)
    runtime = backend.module.Runtime(backend.logger)
    if host_code:
        runtime.engine_host_code_allowed = True
    if path.stat().st_size == 0:  # cannot be mapped
        raise DependencyError(f"{backend} cannot run this plan", where=path, got="an empty file", fix=_REBUILD)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
        _check_validity(backend, runtime, plan, path)
        backend.log.clear()
        engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise DependencyError(f"{backend} refuses the plan", where=path, got=backend.log.excerpt(), fix=_REBUILD)
    return PlanRunner(backend, runtime, engine, device)


def _check_validity(backend: Backend, runtime: Any, plan: mmap.mmap, path: Path) -> None:
    """Newer libraries say why a plan does not fit before they load it.

    An unsupported GPU alone is passed on with a warning: a release may execute on GPUs it does not support, and says so itself when
    it will not.
    """
    if not hasattr(runtime, "get_engine_validity"):
        return
    validity, diagnostics = runtime.get_engine_validity(plan)
    if validity.name == "VALID":
        return
    members = backend.module.EngineInvalidityDiagnostics.__members__
    reasons = [name for name, member in members.items() if int(diagnostics) & int(member)]
    text = f"{validity.name.lower()}: {', '.join(reasons) or 'no reason given'}"
    if validity.name == "INVALID" and reasons != ["UNSUPPORTED_CC"]:
        raise DependencyError(f"{backend} cannot run this plan", where=path, got=text, fix=_REBUILD)
    warnings.warn(f"{backend} reports the plan {path.name} as {text}", DspineWarning, stacklevel=3)
