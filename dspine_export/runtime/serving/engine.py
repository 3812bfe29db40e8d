"""The serving engine: one thread that runs the loop, any number of threads that submit requests.

engine = Engine(SlotModels(target, executor, slots=16, max_seq_len=2048), tokenizer, EngineSettings())
engine.start()
for event in engine.submit(Request(text="Once upon a time", max_tokens=64)).events():
    ...
engine.close()
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from dspine_export.errors import DspineError
from dspine_export.runtime.batch_buckets import batch_bucket
from dspine_export.runtime.serving.admission import Admission, Limits
from dspine_export.runtime.serving.counters import Counters
from dspine_export.runtime.serving.handle import Handle, Sink
from dspine_export.runtime.serving.outcomes import UnavailableError, outcome_of
from dspine_export.runtime.serving.request import Request
from dspine_export.runtime.serving.scheduler import BrokenError, Scheduler
from dspine_export.runtime.serving.slot_models import PROMPT_STEP, SlotModels

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSettings:
    """How to serve.

    Attributes:
        slots: sequences at once, as the models were made with. max_queue: requests that may wait beyond those.
        chunk_tokens: most prompt tokens between two rounds of the running streams, padding included.
        limits: of a single request. threads: CPU threads of the loop's torch, None for torch's default.
        ahead: queue a round before the one before is read, where the models gain from it.
    """

    slots: int = 16
    max_queue: int = 256
    chunk_tokens: int = 512
    limits: Limits = field(default_factory=Limits)
    threads: int | None = None
    ahead: bool = True


class Engine:
    """See the module. `submit`, `snapshot` and `close` may be called from any thread."""

    def __init__(self, models: SlotModels, tokenizer: Any | None, settings: EngineSettings) -> None:
        self.settings, self.models = settings, models
        self._scheduler = Scheduler(
            models,
            settings.slots,
            max_queue=settings.max_queue,
            chunk_tokens=settings.chunk_tokens,
            ahead=settings.ahead,
        )
        self._admission = Admission(
            tokenizer,
            settings.limits,
            vocab_size=models.target.embed_tokens.shape[0],
            block_size=models.block_size,
            drafts_for=models.drafts_for,
            eos_ids=models.target.eos_ids,
        )
        self._wake = threading.Condition()
        self._signalled = self._accepting = self._stopping = self._resting = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="dspine-engine", daemon=True)

    @property
    def healthy(self) -> bool:
        """False once the models can no longer be run, and before `start` and after `close`."""
        return self._failure is None and self._accepting

    @property
    def failure(self) -> str | None:
        """Why the engine is broken."""
        return self._failure

    @property
    def queue_depth(self) -> int:
        return self._scheduler.queue_depth

    @property
    def slots_in_use(self) -> int:
        return self._scheduler.slots_in_use

    def start(self, *, warm_up: bool = True) -> None:
        """Starts the loop; with `warm_up` returns after every kind of pass has been run, whose figures are not counted.

        Raises:
            DspineError: the models fail already.
        """
        if warm_up:
            self.models.capture(self.settings.chunk_tokens)
        self._accepting = True
        self._scheduler.emitter.start()
        self._thread.start()
        if warm_up:
            self._warm_up()
            self.reset_counters()

    def submit(self, request: Request, sink: Sink | None = None) -> Handle:
        """Queues a request. `sink` as in `Handle`.

        Raises:
            UsageError: the request is wrong. OverloadedError: the queue is full. UnavailableError: closing, or broken.
        """
        handle = Handle(self._notify, sink)
        try:
            stream = self._admission.stream(request, handle)
            with self._wake:
                self._check_accepting()
                self._scheduler.enqueue(stream)
        except DspineError as error:
            self._scheduler.counters.request(outcome_of(error))
            raise
        self._notify()
        return handle

    def refused(self, error: Exception) -> None:
        """Counts a request that its server turned down before it could be submitted."""
        self._scheduler.counters.request(outcome_of(error))

    def snapshot(self) -> dict[str, Any]:
        """Counters, gauges and health as plain data."""
        gauges = {"queue_depth": self.queue_depth, "slots_in_use": self.slots_in_use, "slots": self.settings.slots}
        return self._scheduler.counters.snapshot() | gauges | {"healthy": self.healthy, "failure": self.failure}

    def reset_counters(self) -> None:
        """Waits until the engine is idle and starts counting anew."""
        self._wait_for_rest(None)
        self._scheduler.emitter.flush()
        self._scheduler.counters = Counters()

    def close(self, drain_seconds: float = 0.0) -> None:
        """Refuses new requests, lets the others finish for at most `drain_seconds`, fails the rest, and ends the thread."""
        with self._wake:
            self._accepting = False
        if not self._thread.is_alive():
            self._scheduler.emitter.close()
            return
        self._wait_for_rest(drain_seconds)
        with self._wake:
            self._stopping = True
            self._signalled = True
            self._wake.notify_all()
        self._thread.join()
        self._scheduler.emitter.close()

    def _check_accepting(self) -> None:
        if self._failure is not None:
            raise UnavailableError("The engine has failed", got=self._failure, fix="restart the server")
        if not self._accepting:
            raise UnavailableError("The engine is not running", fix="wait until the server is ready")

    def _wait_for_rest(self, timeout: float | None) -> None:
        """Waits until the loop has nothing to do."""
        with self._wake:
            self._wake.wait_for(
                lambda: (self._resting and self._scheduler.idle) or self._failure is not None, timeout=timeout
            )

    def _notify(self) -> None:
        with self._wake:
            self._signalled = True
            self._wake.notify_all()

    def _run(self) -> None:
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        device = self.models.target.device
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.inference_mode():
                self._loop()
            self._scheduler.fail_all(UnavailableError("The engine was shut down before this request was done"))
        except Exception as error:
            self._break(error)

    def _loop(self) -> None:
        while True:
            with self._wake:
                if self._scheduler.idle:
                    self._resting = True
                    self._wake.notify_all()
                    self._wake.wait_for(lambda: self._signalled)
                self._signalled = self._resting = False
                if self._stopping:
                    return
            if not self._scheduler.idle:
                self._scheduler.turn()

    def _break(self, error: Exception) -> None:
        LOG.critical("the engine has failed", exc_info=error)
        reason = str(error) if isinstance(error, BrokenError) else f"{type(error).__name__}: {error}"[:400]
        with self._wake:
            self._failure, self._accepting = reason, False
            self._wake.notify_all()
        self._scheduler.fail_all(UnavailableError("The engine has failed", got=reason, fix="restart the server"))

    def _warm_up(self) -> None:
        """A prompt as long as the budget, then greedy and sampled rounds; on a GPU in every batch and prompt size that passes are
        captured for, so that no request waits for a capture.
        """
        tokens, budget = self.models.block_size + 1, self.settings.chunk_tokens
        longest = max(1, min(budget, self.settings.limits.max_seq_len - tokens))
        on_gpu = self.models.target.device.type == "cuda"
        self._serve(Request(token_ids=[0] * longest, max_tokens=tokens, ignore_eos=True), 1)
        most = self.settings.slots if on_gpu else 1
        for size in sorted({min(batch_bucket(n), most) for n in range(1, most + 1)}):
            for heat in (0.0, 1.0):
                ask = Request(token_ids=[0], max_tokens=tokens, temperature=heat, top_p=0.9, ignore_eos=True)
                self._serve(ask, size)
        for length in range(PROMPT_STEP, longest + 1, PROMPT_STEP) if on_gpu else ():
            for count in _doubling(1, min(most, budget // length)):
                self._serve(Request(token_ids=[0] * length, max_tokens=1), count)

    def _serve(self, request: Request, count: int) -> None:
        """Runs a request so many times at once, admitted together."""
        with self._wake:  # the idle loop waits for this
            handles = [self.submit(request) for _ in range(count)]
        for handle in handles:
            handle.result()


def _doubling(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2
