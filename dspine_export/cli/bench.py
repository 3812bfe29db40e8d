"""``dspine-export bench``: what a draft pass costs on this GPU."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dspine_export.cli.guard import command
from dspine_export.cli.options import AsJson

LARGEST = 1 << 20  # batch or context

def bench(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SOURCE]",
            help="A bundle or drafter checkpoint: its shapes, and a bundle's engine. Without one: the Qwen3-8B drafter's shapes.",
            show_default=False,
        ),
    ] = None,
    batches: Annotated[str, typer.Option(metavar="N,N", help="Batch sizes.")] = "1,8,32,128",
    contexts: Annotated[str, typer.Option(metavar="N,N", help="Context lengths.")] = "1024,8192,32768",
    naive: Annotated[bool, typer.Option(help="Time the eager model in a CUDA graph as well.")] = True,
    compile_batches: Annotated[
        str, typer.Option(metavar="N,N", help="Batch sizes at which torch.compile is timed, at the first context.")
    ] = "1,32",
    stages: Annotated[bool, typer.Option(help="Take our pass apart, at the first context.")] = True,
    fp8: Annotated[bool, typer.Option(help="Time our pass with float8 weights as well, at the first context.")] = True,
    seconds: Annotated[float, typer.Option(help="Begin no cell after so long.")] = 1800.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON report here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time a draft pass against its floor: naive graph, torch.compile, our kernels, the engine; DFlash and DSpine. Needs a GPU."""
    report_file = None if out is None else _ReportFile(out)
    with command(as_json=as_json, left=lambda: report_file.remains() if report_file else None) as console:
        from dspine_export.runtime.bench.measure import BenchRequest, run_benchmark
        from dspine_export.runtime.bench.table import report_lines

        request = BenchRequest(
            source=source,
            batches=_numbers("--batches", batches),
            contexts=_numbers("--contexts", contexts),
            naive=naive,
            compile_batches=_numbers("--compile-batches", compile_batches) if compile_batches else (),
            stages=stages,
            fp8=fp8,
            seconds=_duration(seconds),
        )
        if report_file is not None:
            report_file.probe()
        report = run_benchmark(request, console.note, None if report_file is None else report_file.write)
        console.result(report, report_lines(report))


def _numbers(where: str, text: str) -> tuple[int, ...]:
    from dspine_export.errors import UsageError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= 7 and 0 < int(part) <= LARGEST for part in parts):
        got = text if len(text) <= 80 else f"{text[:77]}..."
        raise UsageError("Not a list of sizes", where=where, got=got, expected=f"numbers from 1 to {LARGEST}, commas between")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _duration(seconds: float) -> float:
    from dspine_export.errors import UsageError

    if not seconds > 0:
        raise UsageError("Not a duration", where="--seconds", got=seconds, expected="more than 0")
    return seconds


class _ReportFile:
    """The report on disk, replaced whole every time it has grown; special files are written to as they are."""

    def __init__(self, path: Path) -> None:
        self._path, self._written = path, False

    def remains(self) -> str | None:
        """What is there if the command ends now."""
        return f"what was measured so far is in {self._path}" if self._written else None

    def probe(self) -> None:
        """Raises OutputError where a report could not be written, an hour before it would be."""
        with self._named():
            if self._path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a directory")
            with tempfile.NamedTemporaryFile(dir=self._path.parent):
                pass

    def write(self, report: dict[str, object]) -> None:
        text = json.dumps(report, indent=1) + "\n"
        with self._named():
            if self._path.exists() and not self._path.is_file():
                self._path.write_text(text, encoding="utf-8")
                return
            beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
            try:
                beside.write_text(text, encoding="utf-8")
                os.replace(beside, self._path)
            finally:
                beside.unlink(missing_ok=True)
        self._written = True

    @contextmanager
    def _named(self) -> Iterator[None]:
        from dspine_export.errors import OutputError

        try:
            yield
        except OSError as error:
            raise OutputError("The report cannot be written", where=self._path, got=error.strerror) from error
