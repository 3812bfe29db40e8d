"""Getting bundle and target into the repository, by hard link where the file system allows it, or naming where they are."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dspine_export.bundle import Bundle
from dspine_export.bundle.manifest import MANIFEST_NAME
from dspine_export.errors import UsageError
from dspine_export.triton.options import Placement

BUNDLE_FOLDER, TARGET_FOLDER = "bundle", "target"
# Other formats of the same weights, which nothing here reads.
_OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite"}


def target_files(folder: Path) -> Iterator[Path]:
    """The target's own files: configuration, tokenizer and safetensors, whatever links they are reached through."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _OTHER_WEIGHTS:
            yield path


def place_bundle(bundle: Bundle, staging: Path, placement: Placement) -> None:
    """Put the bundle under ``staging/bundle``; its own Triton repository, if it has one, stays behind."""
    names = [entry.path for entry in bundle.manifest.files if not entry.path.startswith("triton/")]
    left = len(bundle.manifest.files) - len(names)
    for name in names:
        _place(bundle.path / name, staging / BUNDLE_FOLDER / name, placement)
    if left:
        kept = tuple(entry for entry in bundle.manifest.files if not entry.path.startswith("triton/"))
        text = bundle.manifest.model_copy(update={"files": kept}).to_json()
        (staging / BUNDLE_FOLDER / MANIFEST_NAME).write_text(text, encoding="utf-8")
    else:
        _place(bundle.path / MANIFEST_NAME, staging / BUNDLE_FOLDER / MANIFEST_NAME, placement)


def place_target(target: Path, staging: Path, placement: Placement) -> None:
    """Put the target's files under ``staging/target``."""
    for path in target_files(target):
        _place(path.resolve(), staging / TARGET_FOLDER / path.name, placement)


def relative_to_repository(path: Path, output: Path) -> str:
    """``path`` as seen from the repository that will be ``output``.

    Raises:
        UsageError: a path that cannot stand in a configuration file.
    """
    relative = os.path.relpath(os.path.realpath(path), os.path.realpath(output))
    if any(character in relative for character in "\n\r\0"):
        raise UsageError("the path cannot be written into a configuration", where=path)
    return relative


def _place(source: Path, destination: Path, placement: Placement) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    if placement == "link":
        try:
            destination.hardlink_to(source)
            return
        except OSError:  # another file system, or one without hard links
            pass
    shutil.copyfile(source, destination)
