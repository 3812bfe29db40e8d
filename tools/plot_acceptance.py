"""The lab's figure: how far a block survives, and the acceptance length of every arm with its interval.

    python -m tools.plot_acceptance --result tools/results/acceptance_b8.json --out tools/results/acceptance_b8.png

Needs matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tools.training.lab_files import read_json

COLOURS = {"a": "#8c8c8c", "b": "#b58900", "c": "#2aa198", "d": "#268bd2", "e": "#d33682", "f": "#e39ac0", "g": "#b07aa1", "h": "#f0c0d8"}
COLOURS |= {"k": "#6c3483", "l": "#a569bd"}
SETTINGS = (("t0", "temperature 0"), ("t1_public", "temperature 1"))


def setting_of(result: dict[str, Any], letter: str, setting: str) -> dict[str, Any]:
    """The table entry behind a bar: at temperature 1 drawn from q where the method has a joint q, else its best choices."""
    return dict(result["arms"][letter][result["bar"][setting]["proposals"][letter]])


def survival(axis: Any, result: dict[str, Any]) -> None:
    """Share of calls whose first i drafted tokens were all kept, temperature 0."""
    for letter, arm in result["arms"].items():
        kept = arm["t0"]["kept_per_slot"]
        width, style = (2.4, "-") if letter == "e" else (1.3, "--" if letter in "fghkl" else "-")
        label = f"{letter}  {arm['title']}"
        axis.plot(range(1, len(kept) + 1), kept, style, color=COLOURS[letter], lw=width, marker="o", ms=3, label=label)
    axis.set(xlabel="position in the block", ylabel="share of calls kept up to here", ylim=(0, 1), title="Survival, temperature 0")
    axis.legend(fontsize=7, frameon=False)


def bars(axis: Any, result: dict[str, Any]) -> None:
    """tau with 95 % intervals at both temperatures."""
    letters = list(result["arms"])
    for shift, (setting, label) in zip((-0.2, 0.2), SETTINGS, strict=True):
        taus = [setting_of(result, letter, setting)["tau"] for letter in letters]
        errors = [[t["value"] - t["low"] for t in taus], [t["high"] - t["value"] for t in taus]]
        places = [i + shift for i in range(len(letters))]
        colours = [COLOURS[letter] for letter in letters]
        drawn = axis.bar(places, [t["value"] for t in taus], 0.38, color=colours, alpha=1.0 if setting == "t0" else 0.55, label=label)
        axis.errorbar(places, [t["value"] for t in taus], yerr=errors, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
        axis.bar_label(drawn, fmt="%.2f", fontsize=6, padding=4)
    axis.set_xticks(range(len(letters)), letters)
    axis.set(ylabel="tau, bonus token included", ylim=(1, None), title="Acceptance length: solid T = 0, pale T = 1")


def main(argv: list[str] | None = None) -> None:
    """Draw one result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args(argv)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    result = read_json(a.result)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    survival(left, result)
    bars(right, result)
    figure.savefig(a.out, dpi=110)
    print(f"{a.out}: {a.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
