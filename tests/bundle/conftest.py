"""A minimal complete manifest and a helper that publishes a small bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dspine_export.bundle import DrafterSummary, Manifest, inventory, staged_bundle, write_manifest
from dspine_export.recipes import Recipe


def manifest_of(staging: Path) -> Manifest:
    drafter = DrafterSummary(
        architecture="DSpineDraftModel",
        layout="specforge",
        is_causal=True,
        hidden_size=8,
        num_layers=1,
        vocab_size=16,
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(0, 2),
    )
    return Manifest(recipe=Recipe(), drafter=drafter, sources=(), versions={}, files=inventory(staging))


def publish(output: Path, text: str, *, force: bool = False) -> None:
    with staged_bundle(output, force=force) as staging:
        (staging / "onnx").mkdir()
        (staging / "onnx" / "draft.onnx").write_text(text)
        write_manifest(staging, manifest_of(staging))


@pytest.fixture(name="publish")
def _publish() -> Callable[..., None]:
    return publish
