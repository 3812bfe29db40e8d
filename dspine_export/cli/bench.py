"""``dspine-export bench``: what a draft pass costs on this GPU."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dspine_export.cli.guard import command
from dspine_export.cli.options import AsJson


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
    with command(as_json=as_json) as console:
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
            seconds=seconds,
        )
        report = run_benchmark(request, console.note, None if out is None else partial(_write, out))
        console.result(report, report_lines(report))


def _numbers(where: str, text: str) -> tuple[int, ...]:
    from dspine_export.errors import UsageError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 0 < int(part) <= 1 << 20 for part in parts):
        raise UsageError("Not a list of sizes", where=where, got=text, expected="positive numbers with commas between")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _write(path: Path, report: dict[str, object]) -> None:
    from dspine_export.errors import OutputError

    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError("The report cannot be written", where=path, got=error.strerror) from error
