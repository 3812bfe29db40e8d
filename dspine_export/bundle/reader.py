"""Opening a finished bundle: parse the manifest strictly, then check the files it lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dspine_export.bundle.hashing import sha256_of, walk_files
from dspine_export.bundle.manifest import FORMAT, MANIFEST_NAME, SCHEMA_VERSION, FileEntry, Manifest
from dspine_export.errors import DspineError, OutputError, UsageError, VerificationError

_MANIFEST_LIMIT_BYTES = 16 << 20
# Serving configuration is the operator's to change; everything else is as it was built.
_EDITABLE = ("trtllm/config.yaml", "trtllm/triton/", "triton/")
_BYTECODE = "__pycache__"  # Python leaves one where a server imported the bundle's TensorRT-LLM package


@dataclass(frozen=True)
class Bundle:
    """A finished bundle: its absolute directory and parsed manifest."""

    path: Path
    manifest: Manifest

    def file(self, relative: str) -> Path:
        """The absolute path of a listed file."""
        return self.path / relative


def is_bundle(path: Path, form: str = FORMAT) -> bool:
    """Whether ``path`` is a directory with a dspine manifest, of any schema version and however damaged its files are.

    Args:
        form: the ``format`` the manifest must name: another kind of output has a manifest of its own.
    """
    try:
        with _readable(path, UsageError):
            return _read_manifest(path).get("format") == form
    except (UsageError, VerificationError):
        return False


def open_bundle(path: Path, *, check_hashes: bool = False, unchecked: tuple[str, ...] = ()) -> Bundle:
    """Open a bundle; every listed file must exist with its size, and with its sha256 when ``check_hashes`` is set.

    Args:
        unchecked: beginnings of paths that may be missing or damaged, because the caller replaces them.

    Raises:
        UsageError: not a bundle, or written by a version with another manifest schema.
        VerificationError: the manifest is damaged, or a file is missing, changed or not listed.
    """
    path = path.absolute()
    with _readable(path, UsageError):
        manifest = _parse(path, _read_manifest(path))
    with _readable(path, VerificationError):
        for entry in manifest.files:
            if not entry.path.startswith(unchecked):
                _check_file(path, entry, check_hashes=check_hashes)
    if check_hashes and (extra := unlisted_files(path, {entry.path for entry in manifest.files})):
        raise VerificationError(
            "the bundle holds a file its manifest does not list",
            where=extra[0],
            fix="remove the file, or build the bundle again",
        )
    return Bundle(path, manifest)


def claimed_files(path: Path) -> set[str]:
    """The paths a bundle's manifest lists, of any schema version and however damaged the rest of it is."""
    entries = _read_manifest(path).get("files")
    paths = [entry.get("path") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return {name for name in paths if isinstance(name, str)}


def unlisted_files(root: Path, listed: set[str]) -> list[Path]:
    """Files under ``root`` other than the ``listed`` ones and the manifest, Python's bytecode aside.

    Raises:
        VerificationError: a link or special file among them.
    """
    try:
        found = (path for path in walk_files(root) if _BYTECODE not in path.relative_to(root).parts)
        return [path for path in found if path.relative_to(root).as_posix() not in listed]
    except OutputError as error:
        raise VerificationError(error.what, where=error.where, got=error.got) from error


@contextmanager
def _readable(path: Path, kind: type[DspineError]) -> Iterator[None]:
    """What the file system refuses: no permission, a name too long, a loop of links."""
    try:
        yield
    except OSError as error:
        raise kind("the bundle cannot be read", where=error.filename or path, got=error.strerror) from error


def _read_manifest(path: Path) -> dict[str, Any]:
    source = path / MANIFEST_NAME
    if not path.is_dir():
        raise UsageError("no such bundle", where=path, expected="the output directory of `dspine-export build`")
    if not source.is_file():
        raise UsageError(
            "this directory is not a dspine bundle",
            where=path,
            got=f"no {MANIFEST_NAME}",
            expected="the output directory of `dspine-export build`",
        )
    if source.stat().st_size > _MANIFEST_LIMIT_BYTES:
        raise VerificationError(
            "the manifest is too large to be one", where=source, got=f"{source.stat().st_size} bytes"
        )
    try:
        document = json.loads(source.read_bytes())
    except (ValueError, RecursionError) as error:
        raise VerificationError(
            "the manifest is not valid JSON", where=source, got=error, fix="build the bundle again"
        ) from error
    if not isinstance(document, dict):
        raise VerificationError("the manifest is not a JSON object", where=source, fix="build the bundle again")
    return document


def _parse(path: Path, document: dict[str, Any]) -> Manifest:
    source = path / MANIFEST_NAME
    if document.get("format") != FORMAT:
        raise UsageError(
            "this manifest is not a dspine bundle's", where=source, got=document.get("format"), expected=FORMAT
        )
    if document.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            "this bundle was written with another manifest schema",
            where=source,
            got=document.get("schema_version"),
            expected=SCHEMA_VERSION,
            fix="build it again with this version of dspine-export",
        )
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the document"
        raise VerificationError(
            "the manifest is damaged", where=f"{source}: {key}", got=first["msg"], fix="build the bundle again"
        ) from error


def _check_file(root: Path, entry: FileEntry, *, check_hashes: bool) -> None:
    path = root / entry.path
    fix = "copy the whole bundle directory again, or build it again"
    if entry.path.startswith(_EDITABLE) and not path.exists():
        return
    if not path.is_file():
        raise VerificationError(
            "a file of the bundle is missing", where=path, expected=f"{entry.size_bytes} bytes", fix=fix
        )
    if not path.resolve().is_relative_to(root.resolve()):
        raise VerificationError(
            "a file of the bundle is a link that leads outside it", where=path, got=path.resolve(), fix=fix
        )
    if entry.path.startswith(_EDITABLE):
        return
    size = path.stat().st_size
    if size != entry.size_bytes:
        raise VerificationError(
            "a file of the bundle has the wrong size",
            where=path,
            got=f"{size} bytes",
            expected=f"{entry.size_bytes} bytes",
            fix=fix,
        )
    if check_hashes and (digest := sha256_of(path)) != entry.sha256:
        raise VerificationError(
            "a file of the bundle was changed", where=path, got=digest, expected=entry.sha256, fix=fix
        )
