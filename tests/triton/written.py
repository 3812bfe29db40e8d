"""Configurations of a written repository, parsed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspine_export.triton import model_config


def configuration(repository: Path, model: str) -> Any:
    return model_config.parse((repository / "model_repository" / model / "config.pbtxt").read_text())


def parameters(config: Any) -> dict[str, str]:
    return {name: value.string_value for name, value in config.parameters.items()}
