"""The manifest is strict about keys, paths, ranges and references."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from dspine_export.bundle import EngineEntry, FileEntry, Manifest
from dspine_export.recipes import Profile

from .conftest import manifest_of


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", "a\\b", "", ".", "a//b", "./a", "a/", "a\0b"])
def test_paths_stay_inside(path: str) -> None:
    with pytest.raises(ValidationError, match="plain relative path"):
        FileEntry(path=path, sha256="0" * 64, size_bytes=1)


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "A" * 64, "g" * 64])
def test_digest_is_sha256_hex(digest: str) -> None:
    with pytest.raises(ValidationError):
        FileEntry(path="a", sha256=digest, size_bytes=1)


def test_round_trip_and_unknown_keys(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    document = json.loads(manifest.to_json())
    assert Manifest.model_validate(document) == manifest
    with pytest.raises(ValidationError, match="surprise"):
        Manifest.model_validate({**document, "surprise": 1})


def test_engine_files_must_be_listed(tmp_path: Path) -> None:
    engine = EngineEntry(
        id="engines/rtx-1-sm90",
        builder="rtx",
        builder_version="1",
        sm="sm90",
        compute_capabilities=("9.0",),
        plans={"draft": "engines/rtx-1-sm90/draft.plan"},
        profile=Profile(),
    )
    document = manifest_of(tmp_path).model_dump()
    with pytest.raises(ValidationError, match="not listed"):
        Manifest.model_validate({**document, "engines": (engine.model_dump(),)})


def test_files_are_listed_once(tmp_path: Path) -> None:
    entry = FileEntry(path="a", sha256="0" * 64, size_bytes=1).model_dump()
    with pytest.raises(ValidationError, match="twice"):
        Manifest.model_validate({**manifest_of(tmp_path).model_dump(), "files": (entry, entry)})
