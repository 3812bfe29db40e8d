"""The README's acceptance tables say what the result files say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TABLES = {"block of 8": "acceptance_b8", "block of 16": "acceptance_b16", "code target, block of 8": "acceptance_code_target"}


def result(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "tools" / "results" / f"{name}.json").read_text()))


def rows_below(heading: str) -> list[list[str]]:
    """Cells of the table whose header begins with ``heading``."""
    lines = (ROOT / "README.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(heading)) + 2
    last = next(i for i in range(first, len(lines)) if not lines[i].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[first:last]]


def numbers(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d+", cell)]


def stated(interval: dict[str, float], scale: float = 1) -> Any:
    return pytest.approx([scale * interval[key] for key in ("value", "low", "high")], abs=0.0501 if scale > 1 else 0.00501)


@pytest.mark.parametrize("heading", TABLES)
def test_acceptance_lengths(heading: str) -> None:
    arms = result(TABLES[heading])["arms"]
    rows = rows_below(f"| arm, {heading} |")
    assert [row[0][0] for row in rows] == list(arms)
    for title, *cells in rows:
        arm = arms[title[0]]
        wider = arm.get("t1_k64", {}).get("tau")
        measured = [arm["t0"]["tau"], arm["t0"]["tau_without_loops"], arm["t1"]["tau"], wider, arm["t1_argmax"]["tau"]]
        for cell, interval in zip(cells, measured, strict=True):
            assert numbers(cell) == ([] if interval is None else stated(interval)), (title, cell)


@pytest.mark.parametrize(("place", "name"), list(enumerate(TABLES.values())))
def test_gains_and_verdict(place: int, name: str) -> None:
    found = result(name)
    bar, straight = found["bar"], found["bar_without_loops"]
    cells = rows_below("| | over a, T = 0 |")[place][1:]
    gains = [bar["t0"], straight["t0"], bar["t1"], bar["t1_public"], bar["t1_k64"]]
    for cell, table in zip(cells, gains, strict=False):
        assert numbers(cell) == stated(table["e/a-1"], 100), cell
    for cell, table in zip(cells[5:], (bar["t0"], bar["t1"], bar["t1_k64"]), strict=True):
        assert numbers(cell) == stated(table[f"e/{table['best_ancestor']}-1"], 100), cell
        assert cell.endswith(f"({table['best_ancestor']})")
    assert found["dspine_passes"]
    assert found["dspine_passes_stricter"]
