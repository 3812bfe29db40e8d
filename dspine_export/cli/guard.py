"""The frame around every command: exceptions become messages and exit codes."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dspine_export.cli.console import Console
from dspine_export.errors import DependencyError, DspineError, DspineWarning

DEBUG_VARIABLE = "DSPINE_EXPORT_DEBUG"
EXIT_INTERNAL, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


@contextmanager
def command(*, as_json: bool = False, left: Callable[[], str | None] = lambda: None) -> Iterator[Console]:
    """Run a command's body with a console; leaves by SystemExit when it failed.

    A `DspineError` prints its explanation and exits with its own code. Anything else is ours: exit 1, one line, and the traceback in a
    file (on stderr with ``--debug``). Interrupts exit 130.

    Args:
        left: what an interrupted command leaves, in words; None: nothing.
    """
    console = Console(as_json=as_json)
    try:
        with _own_warnings(console):
            yield console
    except DspineError as error:
        raise SystemExit(_explained(console, error)) from None
    except KeyboardInterrupt:
        remains = left() or "no partial output is left behind"
        console.failure(EXIT_INTERRUPTED, "Interrupted", {"what": "interrupted"}, f"interrupted; {remains}")
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:  # the reader of our stdout has gone, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(EXIT_INTERNAL) from None
    except MemoryError:
        exhausted = DependencyError("this machine ran out of memory", fix="free some memory, or use a larger machine")
        raise SystemExit(_explained(console, exhausted)) from None
    except Exception as problem:
        raise SystemExit(_internal(console, problem)) from None


@contextmanager
def _own_warnings(console: Console) -> Iterator[None]:
    """Our warnings go to the user; those of the libraries are for their callers, us, and show up with ``--debug`` only."""
    with warnings.catch_warnings():
        if not debugging():
            warnings.simplefilter("ignore")
        warnings.simplefilter("always", DspineWarning)
        show = warnings.showwarning

        def ours_first(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, DspineWarning):
                console.warn(str(message))
            else:
                show(message, category, *where, **more)

        warnings.showwarning = ours_first
        yield


def _explained(console: Console, error: DspineError) -> int:
    if debugging():
        traceback.print_exc()
    details = {key: getattr(error, key) for key in ("what", "where", "got", "expected", "fix")}
    shown = {key: str(value) for key, value in details.items() if value is not None}
    console.failure(error.exit_code, type(error).__name__, shown, str(error))
    return error.exit_code


def _internal(console: Console, error: Exception) -> int:
    summary = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:300]
    text = f"internal error: {summary}"
    if debugging():
        traceback.print_exc()
    else:
        with tempfile.NamedTemporaryFile(
            "w", prefix="dspine-export-", suffix=".log", delete=False, encoding="utf-8"
        ) as file:
            traceback.print_exc(file=file)
        text += f"\n  this is a fault of dspine-export, not yours; the traceback is in {file.name}"
    console.failure(EXIT_INTERNAL, "InternalError", {"what": summary}, text)
    return EXIT_INTERNAL


def debugging() -> bool:
    """Whether tracebacks are wanted on stderr."""
    return bool(os.environ.get(DEBUG_VARIABLE))


def usage_failure(arguments: list[str]) -> None:
    """After the option parser refused the command line (its message is on stderr): the JSON document that ``--json`` promised."""
    if "--json" in arguments:
        sys.stdout.write(
            '{"ok": false, "exit_code": 2, "error": {"kind": "UsageError", "what": "unusable command line, see stderr"}}\n'
        )
        sys.stdout.flush()
