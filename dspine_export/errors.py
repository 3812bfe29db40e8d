"""One error tree for everything a user can get wrong, each branch with its own process exit code.

A message answers five questions, in this order: what went wrong, where, what was got, what was expected, how to fix it.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with everything a terminal might obey, or an encoding refuse, written as an escape; line breaks and tabs stay.

    Names come from untrusted files, and a control sequence in one can retitle a window or rewrite the line above it.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class DspineError(Exception):
    """An error with a complete explanation; the command line prints it without a traceback.

    Args:
        what: one sentence, no trailing full stop needed.
        where: file, key or tensor the problem sits in.
        got: the offending value, already formatted.
        expected: what would have been accepted.
        fix: the next thing the reader should do.
    """

    exit_code: int = 1

    def __init__(
        self,
        what: str,
        *,
        where: object | None = None,
        got: object | None = None,
        expected: object | None = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.where, self.got, self.expected, self.fix = what, where, got, expected, fix
        details = (("where", where), ("got", got), ("expected", expected), ("fix", fix))
        lines = [what, *(f"  {label}: {value}" for label, value in details if value is not None)]
        super().__init__(printable("\n".join(lines)))


class DspineWarning(UserWarning):
    """Something the user should know that stops nothing; the command line prints it."""


class UsageError(DspineError):
    """A wrong option, recipe or combination of them."""

    exit_code = 2


class CheckpointError(DspineError):
    """A drafter or target checkpoint that is damaged, unsupported or does not fit its partner."""

    exit_code = 3


class DependencyError(DspineError):
    """A package, library or device that is missing or has the wrong version."""

    exit_code = 4


class BuildError(DspineError):
    """Tracing, a pass, ONNX export or the engine build failed."""

    exit_code = 5


class VerificationError(DspineError):
    """A built artefact does not reproduce the torch model."""

    exit_code = 6


class OutputError(DspineError):
    """The output directory exists, is locked, or cannot be written."""

    exit_code = 7
