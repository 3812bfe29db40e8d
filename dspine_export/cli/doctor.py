"""``dspine-export doctor``: what works on this machine and what to do about the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dspine_export.cli.guard import command

if TYPE_CHECKING:
    from dspine_export.doctor import Check

_EXIT_BROKEN = 4


def doctor(
    fix: Annotated[
        bool, typer.Option("--fix", help="Repair what can be repaired (the missing libtensorrt_rtx.so link).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """Check Python, libraries, TensorRT, plugins, compiler, GPU, memory and disk. Exit 4 if something needed is broken."""
    with command(as_json=as_json) as console:
        from dspine_export.doctor import examine

        with console.stage("doctor", "examining this machine"):
            checks = examine(fix=fix)
        broken = [check for check in checks if check.status == "broken"]
        document = {"healthy": not broken, "checks": [check.to_json() for check in checks]}
        console.result(document, _lines(checks))
        if broken:
            raise SystemExit(_EXIT_BROKEN)


def _lines(checks: list[Check]) -> Iterator[str]:
    import io
    import shutil
    import sys

    from rich.console import Console as RichConsole
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found"):
        table.add_column(heading, overflow="fold")
    colours = {"ok": "green", "absent": "dim", "warning": "yellow", "broken": "red"}
    for check in checks:
        found = check.detail if check.fix is None else f"{check.detail}\n-> {check.fix}"
        table.add_row(f"[{colours[check.status]}]{check.status}[/]", _plain(check.name), _plain(found))
    terminal = sys.stdout.isatty()
    sink = io.StringIO()
    width = shutil.get_terminal_size().columns if terminal else 140
    RichConsole(file=sink, width=width, force_terminal=terminal, highlight=False).print(table)
    yield from (line.rstrip() for line in sink.getvalue().splitlines())


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
