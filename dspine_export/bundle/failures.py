"""Which failures are the output's fault: a full disk or a directory that cannot be written, however deeply they were wrapped."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from dspine_export.errors import OutputError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_NEARLY_FULL_BYTES = 1 << 20


def require_free_space(output: Path, needed_bytes: int) -> None:
    """Refuse to start what cannot fit.

    Raises:
        OutputError: the file system of ``output`` has fewer than ``needed_bytes`` free.
    """
    folder = next(parent for parent in (output, *output.parents) if parent.exists())
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise OutputError(
            "not enough disk space for the bundle",
            where=output,
            got=f"{free_bytes / 1e6:,.0f} MB free",
            expected=f"about {needed_bytes / 1e6:,.0f} MB",
            fix="free some space or choose an -o directory on another file system",
        )


def as_output_error(error: Exception, output: Path, staging: Path | None) -> OutputError | None:
    """The ``OutputError`` that explains ``error``, or None when the output is not to blame or says so already.

    Libraries wrap or swallow the operating system's error, so the chain of causes is searched, and a file system without room counts
    as the cause of any failure while writing.
    """
    if isinstance(error, OutputError):
        return None
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno in _FULL:
            return _full(output, link.strerror)
        if isinstance(link, OSError) and link.errno in _DENIED and _ours(link, output, staging):
            return OutputError(
                "the output directory cannot be written",
                where=output,
                got=link.strerror,
                fix="choose an -o directory you may write to",
            )
    if staging is not None and output.parent.exists() and shutil.disk_usage(output.parent).free < _NEARLY_FULL_BYTES:
        return _full(output, f"{type(error).__name__}: {error}".splitlines()[0])
    return None


def _full(output: Path, reason: object) -> OutputError:
    return OutputError(
        "the disk is full, or a file-size limit was reached, while writing the bundle",
        where=output,
        got=reason,
        fix="free some space or choose an -o directory on another file system; nothing was left behind",
    )


def _ours(error: OSError, output: Path, staging: Path | None) -> bool:
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return staging is None or any(name.startswith((str(staging), str(output))) for name in names)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
