"""sha256 of files and the inventory of a directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from dspine_export.bundle.manifest import MANIFEST_NAME, FileEntry
from dspine_export.errors import OutputError

_CHUNK_BYTES = 4 << 20


def sha256_of(path: Path) -> str:
    """The lower-case hex sha256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def walk_files(root: Path) -> Iterator[Path]:
    """Every file under ``root`` except the manifest, sorted; a link or special file is an error, bundles hold plain files only."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted((*names, *(child for child in folders if os.path.islink(os.path.join(folder, child))))):
            path = Path(folder, name)
            if path.is_symlink() or not path.is_file():
                raise OutputError("a bundle holds plain files only", where=path, got="a link or special file")
            if path != root / MANIFEST_NAME:
                yield path


def inventory(root: Path, known: Iterable[FileEntry] = ()) -> tuple[FileEntry, ...]:
    """Entries of every file under ``root``. ``known`` entries are trusted for files that cannot have changed since (hard-linked ones)."""
    hashed = {entry.path: entry for entry in known}
    entries = []
    for path in walk_files(root):
        name, size = path.relative_to(root).as_posix(), path.stat().st_size
        entry = hashed.get(name)
        if entry is None or entry.size_bytes != size:
            entry = FileEntry(path=name, sha256=sha256_of(path), size_bytes=size)
        entries.append(entry)
    return tuple(entries)
