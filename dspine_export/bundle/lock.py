"""One builder at a time per output directory.

The lock is a kernel lock on a file beside the output, ``.NAME.lock``: the kernel drops it when its holder dies, whatever the reason,
so a crash never leaves a bundle locked. The file's text names the holder. It is removed on release; a contender that opened the
removed file notices that the path no longer leads to it and starts over.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dspine_export.errors import OutputError


def lock_path(output: Path) -> Path:
    """The lock file of an output directory."""
    return output.parent / f".{output.name}.lock"


def _still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _acquire(path: Path, output: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip()
            os.close(descriptor)
            raise OutputError(
                "another build is writing this output directory",
                where=output,
                got=f"locked by {holder or 'a process that has just started'}",
                fix="wait for it to finish, stop that process, or choose another -o directory",
            ) from None
        if _still_there(descriptor, path):
            with suppress(OSError):  # the name is a courtesy; a full disk is reported where it matters
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return descriptor
        os.close(descriptor)


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold the lock of ``output`` for the duration of the block.

    Raises:
        OutputError: somebody else holds it (the message names the process), or its directory cannot be written.
    """
    path = lock_path(output)
    try:
        descriptor = _acquire(path, output)
    except OSError as error:
        raise OutputError(
            "the output's parent directory cannot be written",
            where=path.parent,
            got=error.strerror,
            fix="choose another -o directory",
        ) from error
    try:
        yield
    finally:
        if _still_there(descriptor, path):
            path.unlink()
        os.close(descriptor)
