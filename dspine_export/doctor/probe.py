"""Risky questions are asked in a child process: an import that aborts must not take ``doctor`` with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 180


@dataclass(frozen=True)
class Answer:
    """``values`` on success, else one line in ``problem``."""

    values: dict[str, Any]
    problem: str | None = None


def ask(code: str, **arguments: Any) -> Answer:
    """Run Python ``code``, which fills the dictionary ``answer`` and may read ``arguments``, in a child process."""
    script = f"import json\nanswer = {{}}\narguments = json.loads({json.dumps(arguments)!r})\n{code}\nprint()\nprint(json.dumps(answer))\n"
    try:
        child = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Answer({}, f"no answer within {_TIMEOUT_S} s")
    if child.returncode < 0:
        return Answer(
            {}, f"the process was killed by {signal.Signals(-child.returncode).name}: {_last_line(child.stderr)}"
        )
    if child.returncode:
        return Answer({}, _last_line(child.stderr))
    return Answer(json.loads(child.stdout.splitlines()[-1]))


def first_line_of(command: list[str]) -> str | None:
    """First non-empty output line of a program, or None when it is missing or fails."""
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line.strip() for line in child.stdout.splitlines() if line.strip()]
    return lines[0] if lines and child.returncode == 0 else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no message"
