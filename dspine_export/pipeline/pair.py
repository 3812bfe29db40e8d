"""Opening drafter and target together, checked against each other and against the recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dspine_export.checkpoint.load import Checkpoint, check_finite, open_checkpoint
from dspine_export.checkpoint.pairing import check_pairing, read_target
from dspine_export.checkpoint.target import TargetInfo, check_target_finite
from dspine_export.errors import UsageError
from dspine_export.pipeline.progress import Progress
from dspine_export.recipes import Recipe


@dataclass(frozen=True)
class OpenPair:
    """A drafter and the target it belongs to."""

    checkpoint: Checkpoint
    target: TargetInfo


def open_pair(
    checkpoint_path: Path, target_path: Path, recipe: Recipe, progress: Progress, *, finite: bool = True
) -> OpenPair:
    """Validate both sides.

    Args:
        finite: also read every value of the drafter, and of the target's two matrices, in search of NaN and infinity.

    Raises:
        CheckpointError: either is damaged or they do not fit each other.
        UsageError: the recipe is for another pair.
    """
    with progress.stage("checkpoint", str(checkpoint_path)):
        checkpoint = open_checkpoint(checkpoint_path)
        if finite:
            check_finite(checkpoint)
    with progress.stage("target", str(target_path)):
        target = read_target(target_path)
        if finite:
            check_target_finite(target)
        warnings = check_pairing(checkpoint, target)
        _check_recipe(recipe, target)
    for warning in (*checkpoint.warnings, *warnings):
        progress.warn(warning)
    return OpenPair(checkpoint, target)


def _check_recipe(recipe: Recipe, target: TargetInfo) -> None:
    found = {
        "target_architecture": target.architecture,
        "target_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }
    for key, value in found.items():
        expected = getattr(recipe.pair, key)
        if expected is not None and expected != value:
            raise UsageError(
                "this recipe is for another target",
                where=f"recipe {recipe.name}: pair.{key}",
                got=f"{value} in {target.path}",
                expected=expected,
                fix="choose the recipe of this target, or leave --recipe out",
            )
