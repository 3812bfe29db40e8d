"""As much of `triton_python_backend_utils` as the backend uses."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    pass


class TritonError:
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "invalid", "unavailable", "cancelled", "internal"

    def __init__(self, message: str, code: str) -> None:
        self.message, self.code = message, code


class Tensor:
    def __init__(self, name: str, array: NDArray[Any]) -> None:
        self.name, self._array = name, array

    def as_numpy(self) -> NDArray[Any]:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def to_dlpack(self) -> Any:
        return self._array.__dlpack__()


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.as_numpy() for tensor in output_tensors}
        self.error = error


class Request:
    """A request and, in one object, its response sender."""

    def __init__(self, parameters: str = "", **inputs: Any) -> None:
        self._inputs = {name: _array(value) for name, value in inputs.items()}
        self._parameters = parameters
        self.responses: list[InferenceResponse] = []
        self.cancelled = False
        self._final = threading.Event()

    def parameters(self) -> str:
        return self._parameters

    def timeout(self) -> int:
        return 0

    def input(self, name: str) -> Tensor | None:
        return Tensor(name, self._inputs[name]) if name in self._inputs else None

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        return self.cancelled

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        assert not self._final.is_set(), "nothing may follow the final response"
        self.responses.append(response)
        if flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self._final.set()

    def wait(self) -> list[InferenceResponse]:
        assert self._final.wait(60)
        return self.responses


def get_input_tensor_by_name(request: Request, name: str) -> Tensor | None:
    return request.input(name)


class _Metric:
    def __init__(self) -> None:
        self.value = 0.0

    def increment(self, by: float) -> None:
        self.value += by

    def set(self, value: float) -> None:
        self.value = value


class MetricFamily:
    """Keeps the last instance of every family, with its series by label values."""

    COUNTER, GAUGE = "counter", "gauge"
    known: dict[str, MetricFamily] = {}  # noqa: RUF012 - cleared by tests

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.series: dict[tuple[str, ...], _Metric] = {}
        self.known[name] = self

    def Metric(self, labels: dict[str, str]) -> _Metric:
        return self.series.setdefault(tuple(labels.values()), _Metric())


def _array(value: Any) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str | bytes):
        return np.array([value.encode() if isinstance(value, str) else value], dtype=np.object_)
    return np.array([value])
