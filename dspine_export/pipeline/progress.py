"""How long work reports itself; the command line decides how that looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Receives what is being done. All texts are single lines."""

    def stage(self, name: str, detail: str = "") -> AbstractContextManager[None]:
        """Work that takes a while; leaving the block normally means it is done."""

    def note(self, message: str) -> None:
        """A step inside the current stage."""

    def warn(self, message: str) -> None:
        """Something the user should know that stops nothing."""


class Silent:
    """Progress that nobody watches."""

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Iterator[None]:
        yield

    def note(self, message: str) -> None:
        pass

    def warn(self, message: str) -> None:
        pass
