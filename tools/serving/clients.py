"""One streamed generation over HTTP (server-sent events) or gRPC, with the arrival time of every response."""

from __future__ import annotations

import http.client
import json
import queue
import time
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 900.0


@dataclass
class Sample:
    """One request.

    Attributes:
        prompt: its number in the prompt list. started: on the performance counter.
        arrivals: time and number of tokens of every response that brought some.
        tokens: the new token ids. text: the whole output.
        final: outputs of the last response. error: why there is no result, None if there is one.
    """

    prompt: int
    started: float = field(default_factory=time.perf_counter)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    final: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    ended: float = 0.0

    def take(self, outputs: dict[str, Any]) -> None:
        """One response."""
        ids = outputs.get("output_ids", [])
        ids = ids if isinstance(ids, list) else [ids]
        if ids:
            self.arrivals.append((time.perf_counter(), len(ids)))
        self.tokens += ids
        self.text += outputs.get("text_output", "")
        if "finish_reason" in outputs:
            self.final = {key: value for key, value in outputs.items() if key not in ("text_output", "output_ids")}


class HttpClient:
    """A client of ``/generate_stream``; one connection, kept open."""

    def __init__(self, address: str, model: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        self._path = f"/v2/models/{model}/generate_stream"

    def generate(self, prompt: int, request: dict[str, Any]) -> Sample:
        """Send one request and read its stream to the end."""
        sample = Sample(prompt)
        try:
            headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
            self._connection.request("POST", self._path, json.dumps({**request, "stream": True}), headers)
            with self._connection.getresponse() as answer:
                for line in answer:
                    if line.startswith(b"data:"):
                        self._take(sample, json.loads(line[len(b"data:") :]))
                    elif line.startswith(b"{"):  # refused before the stream began
                        self._take(sample, json.loads(line))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._connection.close()  # the next request opens another
            sample.error = sample.error or f"{type(error).__name__}: {error}"
        return _ended(sample)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @staticmethod
    def _take(sample: Sample, event: dict[str, Any]) -> None:
        if "error" in event:
            sample.error = str(event["error"])
        else:
            sample.take(event)


class GrpcClient:
    """A client of the bidirectional stream; one stream, one request at a time."""

    def __init__(self, address: str, model: str) -> None:
        import tritonclient.grpc as triton

        self._triton, self._model = triton, model
        self._client = triton.InferenceServerClient(address)
        self._events: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(callback=lambda result, error: self._events.put((result, error)))

    def generate(self, prompt: int, request: dict[str, Any]) -> Sample:
        """Send one request and read its responses up to the final one."""
        sample = Sample(prompt)
        inputs = [self._input(name, value) for name, value in {**request, "stream": True}.items()]
        try:
            self._client.async_stream_infer(self._model, inputs, enable_empty_final_response=True)
            while True:
                result, error = self._events.get(timeout=TIMEOUT_S)
                if error is not None:
                    sample.error = str(error)
                    break
                sample.take(_outputs(result))
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
        except (queue.Empty, self._triton.InferenceServerException) as error:
            sample.error = f"{type(error).__name__}: {error}"
        return _ended(sample)

    def close(self) -> None:
        """End the stream."""
        self._client.stop_stream()
        self._client.close()

    def _input(self, name: str, value: Any) -> Any:
        import numpy as np

        kinds: dict[type, tuple[str, Any]] = {
            bool: ("BOOL", np.bool_),
            int: ("INT32", np.int32),
            float: ("FP32", np.float32),
            str: ("BYTES", np.object_),
        }
        name_of_type, dtype = kinds[type(value)]
        tensor = self._triton.InferInput(name, [1], name_of_type)
        tensor.set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype=dtype))
        return tensor


Client = HttpClient | GrpcClient


def _outputs(result: Any) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for tensor in result.get_response().outputs:
        values = result.as_numpy(tensor.name).reshape(-1).tolist()
        values = [value.decode() if isinstance(value, bytes) else value for value in values]
        if values or tensor.name == "output_ids":
            outputs[tensor.name] = values if tensor.name in ("output_ids", "accepted_per_position") else values[0]
    return outputs


def _ended(sample: Sample) -> Sample:
    sample.ended = time.perf_counter()
    if sample.error is None and not sample.final:
        sample.error = "the stream ended without a final response"
    return sample
