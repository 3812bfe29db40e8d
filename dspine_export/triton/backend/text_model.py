"""The model `dspine`: text in, text out, the engine of `runtime.serving` in this process.

Decoupled, `execute` only submits: events are sent by a thread of their own, so that a slow client or the server's message queue never
holds up a round. Not decoupled, `execute` waits for the requests of its batch.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from dspine_export.errors import DspineError, UsageError
from dspine_export.runtime.serving.handle import Event, Failed, Handle, Piece
from dspine_export.runtime.serving.open_engine import open_engine
from dspine_export.triton.backend.errors import error_response, tensors_response
from dspine_export.triton.backend.metrics import MetricsExporter
from dspine_export.triton.backend.parameters import ModelParameters, engine_settings, pair_source
from dspine_export.triton.backend.text_inputs import TextRequest, parse_request
from dspine_export.triton.backend.text_outputs import final_arrays, piece_arrays

LOG = logging.getLogger(__name__)
CANCELLATION_SECONDS, METRICS_SECONDS = 0.05, 0.25


@dataclass(eq=False)
class _Job:
    """A request whose responses are sent as they come; `stream`: piece by piece.

    `lock`, `ended`: Triton frees a request's sender with its last response, and asking it afterwards whether the request was cancelled
    brings the whole server down.
    """

    sender: Any
    stream: bool
    handle: Handle | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: bool = False

    def cancelled(self) -> bool:
        """Whether the client has given the request up; False once it has ended."""
        with self.lock:
            return not self.ended and bool(self.sender.is_cancelled())


class TextModel:
    """What `model.TritonPythonModel` becomes for the kind `text`.

    Args:
        pb_utils: Triton's module. config: the parsed configuration. name, version: of the model. instance: name of this process.

    Raises:
        DspineError: the parameters are wrong, or the pair cannot be served.
    """

    def __init__(
        self,
        pb_utils: Any,
        config: dict[str, Any],
        parameters: ModelParameters,
        name: str,
        version: str,
        instance: str = "",
    ) -> None:
        self._pb = pb_utils
        self._decoupled = bool((config.get("model_transaction_policy") or {}).get("decoupled", False))
        self._batched = int(config.get("max_batch_size", 0)) > 0
        settings = engine_settings(parameters)
        self._max_prompt_bytes = settings.limits.max_prompt_bytes
        self._drain_seconds = parameters.number("drain_seconds")
        self._strict = parameters.boolean("strict_fields")
        self.engine = open_engine(pair_source(parameters), settings)
        self.engine.start(warm_up=parameters.boolean("warmup"))
        self._metrics = MetricsExporter(pb_utils, name, version, instance, self.engine.models.block_size)
        self._metrics.update(self.engine.snapshot())
        self._events: queue.SimpleQueue[tuple[_Job, Event] | None] = queue.SimpleQueue()
        self._jobs: set[_Job] = set()
        self._changed = threading.Condition()
        self._stale = self._closing = False
        self._next_export = 0.0
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send_events, self._watch)]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Starts the requests; waits for them unless the model is decoupled."""
        if self._decoupled:
            for request in requests:
                self._start(request)
            return None
        handles = [self._submit(request) for request in requests]
        responses = [self._wait(handle, request) for handle, request in zip(handles, requests, strict=True)]
        self._update_metrics()
        return responses

    def close(self) -> None:
        """Drains the engine, delivers what it still says, and ends the threads."""
        self.engine.close(self._drain_seconds)
        self._events.put(None)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self, request: Any) -> None:
        """Submits a request of a decoupled model; whatever is wrong with it is its own answer."""
        job = _Job(request.get_response_sender(), stream=False)
        try:
            parsed = self._parse(request)
            job.stream = parsed.stream
            with self._changed:
                self._jobs.add(job)
                self._changed.notify_all()
            job.handle = self.engine.submit(parsed.request, lambda event: self._events.put((job, event)))
        except Exception as error:
            self._forget(job)
            self._send(job, error_response(self._pb, error), final=True)
            self._update_metrics()

    def _submit(self, request: Any) -> Handle | Exception:
        try:
            parsed = self._parse(request)
            if parsed.stream:
                fix = "set model_transaction_policy { decoupled: true }"
                raise UsageError("This model does not stream", where="stream", fix=fix)
            return self.engine.submit(parsed.request)
        except Exception as error:
            return error

    def _wait(self, handle: Handle | Exception, request: Any) -> Any:
        if isinstance(handle, Exception):
            return error_response(self._pb, handle)
        while not handle.wait(CANCELLATION_SECONDS):
            if request.is_cancelled():
                handle.cancel()
        try:
            done = handle.result()
        except DspineError as error:
            return error_response(self._pb, error)
        return tensors_response(self._pb, final_arrays(done.text, done.token_ids, done, batched=self._batched))

    def _parse(self, request: Any) -> TextRequest:
        def read(name: str) -> Any:
            tensor = self._pb.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy()

        try:
            limit = self._max_prompt_bytes
            return parse_request(read, request.parameters(), request.timeout(), limit, strict=self._strict)
        except Exception as error:
            self.engine.refused(error)
            raise

    def _send_events(self) -> None:
        while (item := self._events.get()) is not None:
            job, event = item
            if isinstance(event, Piece):
                if job.stream:
                    arrays = piece_arrays(event.text, event.token_ids, batched=self._batched)
                    self._send(job, tensors_response(self._pb, arrays), final=False)
                continue
            self._forget(job)
            if isinstance(event, Failed):
                self._send(job, error_response(self._pb, event.error), final=True)
                continue
            done = event.completion
            text, ids = (event.text, event.token_ids) if job.stream else (done.text, done.token_ids)
            arrays = final_arrays(text, ids, done, batched=self._batched)
            self._send(job, tensors_response(self._pb, arrays), final=True)

    def _send(self, job: _Job, response: Any, *, final: bool) -> None:
        with job.lock:
            job.ended = final
            try:
                job.sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
            except Exception:  # the client is gone, or the server is going
                LOG.warning("a response could not be sent", exc_info=True)

    def _forget(self, job: _Job) -> None:
        with self._changed:
            self._jobs.discard(job)

    def _update_metrics(self) -> None:
        with self._changed:
            self._stale = True
            self._changed.notify_all()

    def _watch(self) -> None:
        """While there is work: asks Triton which requests were cancelled, and exports the metrics; once more when it is done."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stale or self._closing)
                jobs, self._stale = list(self._jobs), bool(self._jobs)
                closing = self._closing
            for job in jobs:
                if job.handle is not None and not job.handle.cancelled and job.cancelled():
                    job.handle.cancel()
            if closing:
                return
            time.sleep(CANCELLATION_SECONDS)
            self._export(at_once=not jobs)

    def _export(self, *, at_once: bool) -> None:
        now = time.monotonic()
        if not at_once and now < self._next_export:
            return
        self._next_export = now + METRICS_SECONDS
        try:
            self._metrics.update(self.engine.snapshot())
        except Exception:
            LOG.warning("the metrics could not be exported", exc_info=True)
