"""Processes that measure by turns."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.turns import START, start_when_ready, turn
from tools.vllm_engine import together

# Two of these note when they hold the device: three times each.
WORKER = """
import sys, time
from pathlib import Path
from tools.turns import turn, wait_for_start
folder, name = Path(sys.argv[1]), sys.argv[2]
if name == "broken":
    sys.exit(3)
wait_for_start(folder, name)
for _ in range(3):
    with turn(folder):
        with (folder / "log").open("a") as log:
            log.write(f"{name} in\\n")
        time.sleep(0.2)
        with (folder / "log").open("a") as log:
            log.write(f"{name} out\\n")
"""


def test_engines_alternate_and_a_failed_one_is_not_waited_for(tmp_path: Path) -> None:
    turns = tmp_path / "turns"
    turns.mkdir()
    names = ["first", "second", "broken"]
    assert (
        together({name: [sys.executable, "-c", WORKER, str(turns), name] for name in names}, "", tmp_path, turns) == 1
    )
    lines = (turns / "log").read_text().split("\n")[:-1]
    held = [line.split()[0] for line in lines[::2]]
    assert lines == [f"{name} {what}" for name in held for what in ("in", "out")], "one at a time"
    assert sorted(held) == ["first"] * 3 + ["second"] * 3
    assert all(one != other for one, other in itertools.pairwise(held)), held
    assert not list(turns.glob("*.turn"))


def test_nobody_starts_before_all_are_ready(tmp_path: Path) -> None:
    (tmp_path / "one.ready").touch()
    assert not start_when_ready(tmp_path, ["one", "other"])
    assert not start_when_ready(tmp_path, [])
    assert not (tmp_path / START).exists()
    assert start_when_ready(tmp_path, ["one"])
    assert (tmp_path / START).exists()


def test_who_died_in_the_queue_is_passed_over(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f"000001-{gone.pid}.turn").touch()
    started = time.monotonic()
    with turn(tmp_path):
        assert [path.name.split("-")[0] for path in tmp_path.glob("*.turn")] == ["000002"]
    assert time.monotonic() - started < 5
    with pytest.raises(ZeroDivisionError), turn(tmp_path):
        raise ZeroDivisionError
    assert not list(tmp_path.glob("*.turn"))
    with turn(None):
        pass
