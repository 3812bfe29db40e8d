"""Output: plain lines off a terminal, a live line on one, JSON alone on stdout, SIGPIPE and startup without noise."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

from .conftest import COMMAND, ROOT, Cli, Invoke


def test_plain_lines_off_a_terminal(shared_pair: Path, invoke: Invoke) -> None:
    result = invoke("inspect", shared_pair / "drafter")
    assert result.code == 0
    assert "\x1b" not in result.out + result.err
    assert "DSpineDraftModel" in result.out
    assert "checkpoint" in result.err


def test_live_line_on_a_terminal(shared_pair: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    command = [*COMMAND, "inspect", str(shared_pair / "drafter")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side has closed
            break
        if not part:
            break
        seen += part
    out = process.communicate()[0]
    assert process.returncode == 0
    assert b"\x1b[" in seen
    assert b"\x1b" not in out


def test_json_is_alone_on_stdout(shared_pair: Path, cli: Cli) -> None:
    result = cli("inspect", shared_pair / "drafter", "--json")
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert document["config"]["block_size"] == 8
    assert document["parameters"] == sum(document["dtypes"].values()) or document["parameters"] > 1000


def test_reader_that_leaves(cli: Cli) -> None:
    shell = f"{' '.join(COMMAND)} recipes qwen3-8b | true"
    result = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr


def test_recipes(invoke: Invoke) -> None:
    assert "qwen3-8b" in invoke("recipes").out
    assert invoke("recipes", "qwen3-8b").out.startswith("# dspine-export build")
    assert json.loads(invoke("recipes", "--json").out)["recipes"][0]["name"] == "qwen3-4b"
    assert invoke("recipes", "nothing").code == 2
