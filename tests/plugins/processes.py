"""Runs scripts in processes of their own: loading plugins cannot be undone, and some ways of loading them crash."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_python(
    script: str, *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a script text with arguments and returns what it printed."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
