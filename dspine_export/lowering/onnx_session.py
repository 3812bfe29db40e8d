"""A thin ONNX Runtime session over torch tensors, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dspine_export.errors import BuildError, DependencyError


class OnnxSession:
    """Feeds torch tensors by name and returns torch tensors by name. Unknown feeds are ignored: graphs drop unused inputs."""

    def __init__(self, path: Path) -> None:
        try:
            import onnxruntime as ort
        except ImportError as error:
            raise DependencyError(
                "ONNX Runtime is not installed", where="onnxruntime", fix="pip install onnxruntime"
            ) from error
        options = ort.SessionOptions()
        options.log_severity_level = 3
        # Threads that spin after a pass take the cores from torch, which runs the target between two passes.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises a family of its own, without a common base
            raise BuildError("ONNX Runtime cannot load the graph", where=path.name, got=str(error)[:1500]) from error
        self.path = path
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._outputs = [value.name for value in self._session.get_outputs()]

    def run(self, feeds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arrays = {name: tensor.contiguous().numpy() for name, tensor in feeds.items() if name in self._inputs}
        return {
            name: torch.from_numpy(value)
            for name, value in zip(self._outputs, self._session.run(None, arrays), strict=True)
        }
