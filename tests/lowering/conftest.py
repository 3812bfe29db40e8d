"""Exports are made once per session and copied where a test damages them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dspine_export.checkpoint.load import Checkpoint, open_checkpoint
from dspine_export.checkpoint.target import TargetInfo, read_target
from dspine_export.lowering import VerificationReport, export_onnx, export_portable, verify_onnx
from tests.golden_cases import drafter_path, write_target
from tests.programs import write_variant


@dataclass(frozen=True)
class Exported:
    """A pair and its exports, laid out as in a bundle: ``onnx`` (fused, bfloat16) and ``portable`` (float32)."""

    checkpoint: Checkpoint
    target: TargetInfo
    folder: Path

    def onnx_files(self) -> list[Path]:
        return sorted(self.folder.glob("*/*.onnx"))

    def verify(self) -> VerificationReport:
        return verify_onnx(self.checkpoint, self.target, self.folder / "portable", cases=((2, 7),))


def export_pair(checkpoint: Path, target: Path, folder: Path, dtype: str) -> Exported:
    drafter, info = open_checkpoint(checkpoint), read_target(target)
    export_onnx(drafter, info, folder / "onnx", dtype=dtype, form="fused")
    export_portable(drafter, info, folder / "portable", folder / "onnx")
    return Exported(drafter, info, folder)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The golden case with grouped queries and three layers."""
    root = tmp_path_factory.mktemp("exported")
    return export_pair(drafter_path("b8_gqa"), write_target("b8_gqa", root / "target"), root, "bfloat16")


@pytest.fixture(scope="session")
def smallest(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A block of two, one candidate and a sliding window, all float32."""
    root = tmp_path_factory.mktemp("smallest")
    return export_pair(*write_variant("smallest", root), root, "float32")


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Exported], Exported]:
    """A copy of the portable folder that a test may damage; another directory, so a graph that knew its place would not load."""

    def copy(source: Exported) -> Exported:
        shutil.copytree(source.folder / "portable", tmp_path / "moved" / "portable")
        return Exported(source.checkpoint, source.target, tmp_path / "moved")

    return copy
