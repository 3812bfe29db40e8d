"""One error tree for everything a user can get wrong, each branch with its own process exit code.

A message answers five questions, in this order: what went wrong, where, what was got, what was expected, how to fix it.
"""

from __future__ import annotations


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
        super().__init__("\n".join(lines))


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
