"""Opening a bundle: what is damaged is named, and a bundle works wherever it is moved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dspine_export.bundle import is_bundle, open_bundle
from dspine_export.errors import DspineError, UsageError, VerificationError

Damage = Callable[[Path], object]


def edit(root: Path, **changes: object) -> None:
    path = root / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def swap_byte(root: Path) -> None:
    path = root / "onnx" / "draft.onnx"
    path.write_text(path.read_text()[:-1] + "!")


def link_outside(root: Path) -> None:
    path = root / "onnx" / "draft.onnx"
    path.rename(root.parent / "outside")
    path.symlink_to(root.parent / "outside")


CASES: dict[str, tuple[Damage, type[DspineError], str]] = {
    "no manifest": (lambda root: (root / "manifest.json").unlink(), UsageError, "not a dspine bundle"),
    "not JSON": (lambda root: (root / "manifest.json").write_text("{"), VerificationError, "not valid JSON"),
    "not an object": (lambda root: (root / "manifest.json").write_text("[]"), VerificationError, "not a JSON object"),
    "deep JSON": (lambda root: (root / "manifest.json").write_text("[" * 100_000), VerificationError, "not valid JSON"),
    "other format": (lambda root: edit(root, format="other"), UsageError, "not a dspine bundle's"),
    "newer schema": (lambda root: edit(root, schema_version=2), UsageError, "another manifest schema"),
    "unknown key": (lambda root: edit(root, surprise=1), VerificationError, "surprise"),
    "missing file": (lambda root: (root / "onnx" / "draft.onnx").unlink(), VerificationError, "missing"),
    "truncated file": (lambda root: (root / "onnx" / "draft.onnx").write_text("x"), VerificationError, "wrong size"),
    "link": (link_outside, VerificationError, "leads outside"),
    "changed file": (swap_byte, VerificationError, "was changed"),
    "stray file": (lambda root: (root / "stray").write_text("x"), VerificationError, "does not list"),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named(case: str, tmp_path: Path, publish: Callable[..., None]) -> None:
    damage, error, message = CASES[case]
    root = tmp_path / "out"
    publish(root, "content")
    damage(root)
    with pytest.raises(error, match=message):
        open_bundle(root, check_hashes=True)


def test_bundle_can_be_moved(tmp_path: Path, publish: Callable[..., None]) -> None:
    publish(tmp_path / "out", "content")
    (tmp_path / "far").mkdir()
    shutil.move(tmp_path / "out", tmp_path / "far" / "away")
    bundle = open_bundle(tmp_path / "far" / "away", check_hashes=True)
    assert bundle.file("onnx/draft.onnx").read_text() == "content"


def test_names_the_file_system_refuses(tmp_path: Path, publish: Callable[..., None]) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        open_bundle(tmp_path / ("x" * 5000))
    assert not is_bundle(tmp_path / ("x" * 5000))
    publish(tmp_path / "out", "content")
    listed = json.loads((tmp_path / "out" / "manifest.json").read_text())["files"]
    edit(tmp_path / "out", files=[{**listed[0], "path": "x" * 5000}])
    with pytest.raises(VerificationError, match="cannot be read"):
        open_bundle(tmp_path / "out")


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such bundle"):
        open_bundle(tmp_path / "nothing")
