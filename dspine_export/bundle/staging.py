"""A bundle appears all at once or not at all.

Everything is written to a sibling directory ``.NAME.building-PID-XXXX``, flushed to disk, and renamed into place. Replacing an existing
bundle swaps the two directories in one system call, and only then deletes the old one. A killed build leaves its sibling behind; the
next build of the same output holds the lock, so it knows the sibling is nobody's and removes it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dspine_export.bundle.failures import as_output_error
from dspine_export.bundle.lock import locked
from dspine_export.bundle.manifest import MANIFEST_NAME, Manifest
from dspine_export.bundle.reader import Bundle, is_bundle
from dspine_export.errors import OutputError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def check_output(output: Path, *, force: bool) -> None:
    """Refuse an output directory that must not be overwritten; an empty directory is free to use.

    Raises:
        OutputError: it is not a directory, holds something that is not a bundle, or is a bundle and ``force`` is not set.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise OutputError("the output exists and is not a directory", where=output, fix="choose another -o directory")
    if not any(output.iterdir()):
        return
    if not is_bundle(output):
        raise OutputError(
            "the output directory holds something that is not a dspine bundle",
            where=output,
            expected="a new or empty directory, or a bundle with --force",
            fix="choose another -o directory; --force never overwrites other people's files",
        )
    if not force:
        fix = "add --force to replace it, or choose another -o directory"
        raise OutputError("the output directory already holds a bundle", where=output, fix=fix)


@contextmanager
def staged_bundle(output: Path, *, force: bool = False, seed: Bundle | None = None) -> Iterator[Path]:
    """Lock ``output`` and give a directory to fill; leaving the block without an error publishes it as ``output``.

    Args:
        force: replace an existing bundle, atomically, once the new one is complete.
        seed: a finished bundle whose files the new one starts from (hard links: a file is replaced, never written in place).

    Raises:
        OutputError: locked, in the way, not writable, or the disk filled up. Nothing is left behind.
    """
    output = Path(os.path.realpath(output))
    made = _make_parents(output.parent)
    staging: Path | None = None
    try:
        with locked(output):
            _recover(output)
            check_output(output, force=force)
            staging = _new_staging(output)
            try:
                if seed is not None:
                    _link_files(seed, staging)
                yield staging
                _publish(staging, output)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except Exception as error:
        explained = as_output_error(error, output, staging)
        if explained is None:
            raise
        raise explained from error
    finally:
        for folder in made:
            with suppress(OSError):  # only an empty one goes
                folder.rmdir()


def write_manifest(staging: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` by replacement, never in place: the file may be a hard link into the bundle it came from."""
    temporary = staging / f".{MANIFEST_NAME}.new"
    temporary.write_text(manifest.to_json(), encoding="utf-8")
    temporary.replace(staging / MANIFEST_NAME)


def _make_parents(parent: Path) -> list[Path]:
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError("the output's parent directory cannot be made", where=parent, got=error.strerror) from error
    return missing


def _siblings(output: Path, kind: str) -> list[Path]:
    prefix = f".{output.name}.{kind}-"
    return [path for path in output.parent.iterdir() if path.name.startswith(prefix)]


def _recover(output: Path) -> None:
    """Undo what a killed build left: put a half-replaced bundle back, delete everything else. The lock must be held."""
    for old in _siblings(output, "replaced"):
        if not output.exists():
            old.rename(output)
    for stale in (*_siblings(output, "building"), *_siblings(output, "replaced")):
        shutil.rmtree(stale)


def _new_staging(output: Path) -> Path:
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.building-{os.getpid()}-", dir=output.parent))
    umask = os.umask(0)
    os.umask(umask)
    staging.chmod(0o777 & ~umask)  # mkdtemp makes it private; a published bundle is an ordinary directory
    return staging


def _link_files(seed: Bundle, staging: Path) -> None:
    for entry in seed.manifest.files:
        target = staging / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            target.hardlink_to(seed.path / entry.path)
        except OSError:  # a file system without hard links
            shutil.copyfile(seed.path / entry.path, target)


def _publish(staging: Path, output: Path) -> None:
    assert (staging / MANIFEST_NAME).is_file(), "a bundle is published with its manifest"
    for folder, _, names in os.walk(staging):
        for path in (*(os.path.join(folder, name) for name in names), folder):
            _flush(path)
    if output.exists() and any(output.iterdir()):
        if not _exchange(staging, output):
            replaced = staging.with_name(staging.name.replace(".building-", ".replaced-", 1))
            output.rename(replaced)
            staging.rename(output)
            shutil.rmtree(replaced, ignore_errors=True)
    else:
        staging.rename(output)
    _flush(output.parent)


def _flush(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step; False where the kernel, the C library or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0)
