"""A bundle appears all at once or not at all.

Everything is written to a sibling directory ``.NAME.building-PID-XXXX``, flushed to disk, and renamed into place. Replacing an existing
bundle swaps the two directories in one system call, and only then deletes the old one. A killed build leaves its sibling behind; the
next build of the same output holds the lock, so it knows the sibling is nobody's and removes it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dspine_export.bundle.failures import as_output_error
from dspine_export.bundle.lock import locked
from dspine_export.bundle.manifest import FORMAT, MANIFEST_NAME, Manifest
from dspine_export.bundle.reader import Bundle, claimed_files, is_bundle, unlisted_files
from dspine_export.errors import OutputError, VerificationError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NAME_BYTES = 255 - len(".building-") - len("..4194304-12345678")  # names beside the output carry its own


def check_output(output: Path, *, force: bool, form: str = FORMAT) -> None:
    """Refuse an output directory that must not be overwritten; an empty directory is free to use.

    Args:
        form: the manifest format of what may be replaced; other outputs than bundles have their own.

    Raises:
        OutputError: it is not a directory, cannot be made, holds something that is not a bundle or other files beside one, or is a
            bundle and ``force`` is not set.
    """
    try:
        _check_place(Path(os.path.realpath(output)))
        _check_contents(output, force=force, form=form)
    except OSError as error:
        raise OutputError(
            "the output directory cannot be used", where=output, got=error.strerror, fix="choose another -o directory"
        ) from error


def _check_contents(output: Path, *, force: bool, form: str) -> None:
    noun = form.removeprefix("dspine-").replace("-", " ")
    if not output.exists():
        return
    if not output.is_dir():
        raise OutputError("the output exists and is not a directory", where=output, fix="choose another -o directory")
    if not any(output.iterdir()):
        return
    if not is_bundle(output, form):
        raise OutputError(
            f"the output directory holds something that is not a dspine {noun}",
            where=output,
            expected=f"a new or empty directory, or a {noun} with --force",
            fix="choose another -o directory; --force never overwrites other people's files",
        )
    if not force:
        fix = "add --force to replace it, or choose another -o directory"
        raise OutputError(f"the output directory already holds a {noun}", where=output, fix=fix)
    _check_only_ours(output, noun)


def _check_place(output: Path) -> None:
    """Raise early the OSError that making ``output`` and the directories beside it would end in."""
    if output.is_symlink():  # resolved, so it leads to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if len(os.fsencode(output.name)) > _NAME_BYTES:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    try:
        str(output).encode()  # the bundle's own files name it
    except UnicodeEncodeError:
        raise OSError(errno.EILSEQ, "the path is not valid UTF-8") from None
    parent = next((folder for folder in output.parents if folder.exists()), output)
    if not parent.is_dir():
        raise OSError(errno.ENOTDIR, f"{parent} is not a directory")
    if not os.access(parent, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise OSError(errno.EACCES, f"{os.strerror(errno.EACCES)}: {parent}")


def _check_only_ours(output: Path, noun: str) -> None:
    """Whatever a manifest does not list is somebody's own, and would go with it."""
    try:
        other = unlisted_files(output, claimed_files(output))
    except VerificationError as error:
        other = [Path(str(error.where))]
    if other:
        raise OutputError(
            f"the output directory holds a file that its {noun} does not list",
            where=other[0],
            fix="move it away, or choose another -o directory; --force never deletes other people's files",
        )


@contextmanager
def staged_bundle(
    output: Path, *, force: bool = False, seed: Bundle | None = None, form: str = FORMAT
) -> Iterator[Path]:
    """Lock ``output`` and give a directory to fill; leaving the block without an error publishes it as ``output``.

    Args:
        force: replace an existing bundle, atomically, once the new one is complete.
        seed: a finished bundle whose files the new one starts from (hard links: a file is replaced, never written in place).
        form: the manifest format of another output than a bundle.

    Raises:
        OutputError: locked, in the way, not writable, or the disk filled up. Nothing is left behind.
    """
    output = Path(os.path.realpath(output))
    made = _make_parents(output.parent)
    staging: Path | None = None
    try:
        with locked(output):
            _recover(output)
            check_output(output, force=force, form=form)
            staging = _new_staging(output)
            try:
                if seed is not None:
                    _link_files(seed, staging)
                yield staging
                _publish(staging, output)
            finally:
                with suppress(OSError):
                    _remove(staging)
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
        _remove(stale)


def _remove(tree: Path) -> None:
    """Also where the owner had withdrawn the right to write, as one does to protect a finished bundle."""
    folders = [str(tree)]
    while folders:
        folder = folders.pop()
        if not os.path.islink(folder):
            with suppress(OSError):
                os.chmod(folder, 0o700)
            folders += [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    shutil.rmtree(tree)


def _new_staging(output: Path) -> Path:
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.building-{os.getpid()}-", dir=output.parent))
    umask = os.umask(0)
    os.umask(umask)
    staging.chmod(0o777 & ~umask)  # mkdtemp makes it private; a published bundle is an ordinary directory
    return staging


def _link_files(seed: Bundle, staging: Path) -> None:
    for entry in seed.manifest.files:
        if not (seed.path / entry.path).exists():
            continue  # `open_bundle` lets the operator's own files be deleted
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
            with suppress(OSError):
                _remove(replaced)
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
