"""Output: results on stdout, everything else on stderr; a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from dspine_export.errors import printable


class Console:
    """Implements `pipeline.progress.Progress` and prints results.

    With ``as_json`` exactly one JSON document goes to the real stdout; whatever else writes to stdout, native libraries included, is
    sent to stderr.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self._results: TextIO = sys.stdout
        self._live = _LiveLine() if sys.stderr.isatty() else None
        if as_json:
            sys.stdout.flush()
            self._results = os.fdopen(os.dup(1), "w", encoding="utf-8")
            os.dup2(2, 1)

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Iterator[None]:
        """Show a stage while it runs and how long it took afterwards."""
        started = time.monotonic()
        if self._live:
            self._live.start(name, detail)
        try:
            yield
        except BaseException:
            self.close()
            raise
        seconds = time.monotonic() - started
        if self._live:
            self._live.stop()
        self._log(f"{name:<12} {detail}  [{seconds:.1f} s]" if detail else f"{name:<12} [{seconds:.1f} s]")

    def note(self, message: str) -> None:
        """A step inside a stage: replaces the live line's text, or a line of its own."""
        if self._live and self._live.running:
            self._live.update(message)
        else:
            self._log(f"  {message}")

    def warn(self, message: str) -> None:
        """A warning on stderr."""
        self._log(f"warning: {message}")

    def result(self, document: Mapping[str, Any], lines: Iterator[str] | list[str] | tuple[str, ...]) -> None:
        """Print the outcome: ``document`` as JSON with ``"ok": true`` in front, or the human ``lines``."""
        self.close()
        if self.as_json:
            self._document({"ok": True, **document})
        else:
            for line in lines:
                print(printable(line), file=self._results)
            self._results.flush()

    def failure(self, exit_code: int, kind: str, details: Mapping[str, Any], text: str) -> None:
        """Print an error: the text on stderr, and with ``as_json`` a document with ``"ok": false``."""
        self.close()
        self._log(f"error: {text}")
        if self.as_json:
            self._document({"ok": False, "exit_code": exit_code, "error": {"kind": kind, **details}})

    def write(self, text: str) -> None:
        """Stream text to stdout as it comes; nothing with ``as_json``."""
        if not self.as_json:
            self._results.write(text)
            self._results.flush()

    def close(self) -> None:
        """Remove the live line."""
        if self._live:
            self._live.stop()

    def _log(self, line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    def _document(self, document: Mapping[str, Any]) -> None:
        json.dump(document, self._results, indent=2, default=str)
        self._results.write("\n")
        self._results.flush()


class _LiveLine:
    """One spinner line on a terminal's stderr, drawn by rich, which is imported only when needed."""

    def __init__(self) -> None:
        self._status: Any = None
        self._name = ""

    @property
    def running(self) -> bool:
        return self._status is not None

    def start(self, name: str, detail: str) -> None:
        from rich.console import Console as RichConsole
        from rich.markup import escape

        self.stop()
        self._name = name
        text = f"[bold]{escape(printable(name))}[/bold] {escape(printable(detail))}"
        self._status = RichConsole(stderr=True).status(text)
        self._status.start()

    def update(self, message: str) -> None:
        from rich.markup import escape

        self._status.update(f"[bold]{escape(self._name)}[/bold] {escape(printable(message))}")

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
