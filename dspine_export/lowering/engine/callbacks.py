"""The objects the builder calls back: logger, progress monitor and plan writer.

They run inside C++ frames, where an exception is printed and swallowed: a Ctrl-C or a full disk would be lost and the build reported
as a success. Each callback therefore stores what was raised in a shared `Interruption`; the monitor stops the build on it, and the
caller raises it afterwards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, BinaryIO

# Headings of the listing that detailed verbosity prints for every engine: TensorRT-RTX 1.7, and TensorRT 10 as published.
_ENGINE_LISTINGS = ("Layers:", "Engine Layer Information")
_INT64_NOTICE = "has Int64 binding"  # said of every int64 input and output; ours are int64 by contract


@dataclass
class Interruption:
    """The first exception raised in a callback."""

    error: BaseException | None = None

    def run(self, action: Callable[[], Any], default: Any) -> Any:
        """``action()``, or ``default`` once anything was raised."""
        if self.error is None:
            try:
                return action()
            except BaseException as error:  # KeyboardInterrupt above all: it must survive the C++ frame
                self.error = error
        return default

    def reraise(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


@dataclass
class BuildLog:
    """What the builder said since the last `clear`: problems for error messages, and its own listing of the engine's layers."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    engine_listing: str = ""
    interruption: Interruption = field(default_factory=Interruption)

    def clear(self) -> None:
        self.errors.clear()
        self.warnings.clear()
        self.engine_listing = ""
        self.interruption.error = None

    def excerpt(self, limit: int = 6) -> str:
        """The first errors, one a line; builders repeat themselves, so duplicates are dropped."""
        unique = list(dict.fromkeys(self.errors))
        more = [f"... and {len(unique) - limit} more"] if len(unique) > limit else []
        return "\n       ".join([*unique[:limit], *more]) or "the builder gave no message"


def make_logger(trt: ModuleType, log: BuildLog) -> Any:
    """An ``ILogger`` that files messages into ``log``. The library keeps the first logger it sees: make one per process."""
    severity = trt.ILogger.Severity

    class _Logger(trt.ILogger):  # type: ignore[name-defined,misc]  # the base class is only known at run time
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, level: Any, message: str) -> None:
            log.interruption.run(lambda: self._file(level, message), None)

        def _file(self, level: Any, message: str) -> None:
            if level in (severity.INTERNAL_ERROR, severity.ERROR):
                log.errors.append(message)
            elif level == severity.WARNING:
                if _INT64_NOTICE not in message:
                    log.warnings.append(message)
            elif message.startswith(_ENGINE_LISTINGS):  # verbose: the only such list on a machine without a GPU
                log.engine_listing += message + "\n"

    return _Logger()


def make_monitor(trt: ModuleType, interruption: Interruption, progress: Callable[[str], None]) -> Any:
    """An ``IProgressMonitor`` that reports top-level phases and cancels the build once anything was raised."""

    class _Monitor(trt.IProgressMonitor):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                interruption.run(lambda: progress(phase_name), None)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return bool(interruption.run(lambda: True, False))

        def phase_finish(self, phase_name: str) -> None:
            return None

    return _Monitor()


class PlanSink:
    """Writes plan chunks to a file while hashing them, so that a plan never exists twice in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self.size_bytes = file, hashlib.sha256(), 0

    def write(self, chunk: Any) -> int:
        view = memoryview(chunk)
        self._file.write(view)
        self._hash.update(view)
        self.size_bytes += view.nbytes
        return view.nbytes

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def make_stream_writer(trt: ModuleType, interruption: Interruption, sink: PlanSink) -> Any:
    """An ``IStreamWriter`` into ``sink``. The builder hands over ``bytes`` of up to 64 MiB (and a size, in some versions)."""

    class _Writer(trt.IStreamWriter):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            trt.IStreamWriter.__init__(self)

        def write(self, data: Any, *_size: int) -> int:
            return int(interruption.run(lambda: sink.write(data), 0))

    return _Writer()
