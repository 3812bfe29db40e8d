"""``dspine-export --help`` answers at once because it imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "numpy",
    "onnx",
    "onnxruntime",
    "transformers",
    "pydantic",
    "yaml",
    "tensorrt",
    "tensorrt_rtx",
    "dspine_export.checkpoint",
}
COMMANDS = ("build", "inspect", "verify", "run", "bench", "doctor", "recipes")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "dspine_export", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert "dspine_export.cli.main" in imported or "dspine_export.cli" in imported
    # typer itself reads a command's Path options with pydantic
    allowed = {"pydantic"} if arguments[0] in COMMANDS else set()
    assert not imported & (HEAVY - allowed)


def test_help_names_every_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "dspine_export", "--help"], capture_output=True, text=True, check=True
    )
    assert all(name in result.stdout for name in COMMANDS)
