"""The manifest is strict about keys, paths, ranges and references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def engine_entry(**changes: Any) -> EngineEntry:
    values: dict[str, Any] = {
        "id": "engines/rtx-1-sm90",
        "builder": "rtx",
        "builder_version": "1",
        "sm": "sm90",
        "compute_capabilities": ("9.0",),
        "plans": {entry: f"engines/rtx-1-sm90/{entry}.plan" for entry in ("context", "draft")},
        "profile": Profile(),
    }
    return EngineEntry(**values | changes)


def test_engine_files_must_be_listed(tmp_path: Path) -> None:
    document = manifest_of(tmp_path).model_dump()
    with pytest.raises(ValidationError, match="not listed"):
        Manifest.model_validate({**document, "engines": (engine_entry().model_dump(),)})


@pytest.mark.parametrize("plans", [{}, {"draft": "a"}, {"context": "a", "draft": "b", "other": "c"}])
def test_engine_has_both_plans(plans: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="context and draft"):
        engine_entry(plans=plans)


@pytest.mark.parametrize("abi", ["", "junk", "1", "1.x", "-1.0", "1.0\n"])
def test_plugin_abi_is_a_version(abi: str) -> None:
    with pytest.raises(ValidationError, match="plugin_abi"):
        engine_entry(plugin_abi=abi)


def test_files_are_listed_once(tmp_path: Path) -> None:
    entry = FileEntry(path="a", sha256="0" * 64, size_bytes=1).model_dump()
    with pytest.raises(ValidationError, match="twice"):
        Manifest.model_validate({**manifest_of(tmp_path).model_dump(), "files": (entry, entry)})
