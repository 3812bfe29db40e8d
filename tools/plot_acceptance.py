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
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5)
BAR = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8, "capsize": 2}


def survival(axis: Any, result: dict[str, Any]) -> None:
    """Share of calls whose first i drafted tokens were all kept, temperature 0."""
    for letter, arm in result["arms"].items():
        kept = arm["t0"]["kept_per_slot"]
        width, style = (2.4, "-") if letter == "e" else (1.3, "--" if letter in "fghkl" else "-")
        label = f"{letter}  {arm['title']}"
        axis.plot(range(1, len(kept) + 1), kept, style, color=COLOURS[letter], lw=width, marker="o", ms=3, label=label)
    axis.set(xlabel="position in the block", ylabel="share of calls kept up to here", yscale="log", title="Survival, temperature 0")
    axis.set_yticks(TICKS, [str(tick) for tick in TICKS])
    axis.minorticks_off()
    axis.legend(fontsize=7, frameon=False, loc="lower left")


def bars(axis: Any, result: dict[str, Any], setting: str, title: str) -> None:
    """tau with 95 % intervals, the value below each bar."""
    taus = {letter: arm[setting]["tau"] for letter, arm in result["arms"].items()}
    heights = [t["value"] for t in taus.values()]
    errors = [[t["value"] - t["low"] for t in taus.values()], [t["high"] - t["value"] for t in taus.values()]]
    axis.bar(range(len(taus)), heights, 0.7, color=[COLOURS[letter] for letter in taus])
    axis.errorbar(range(len(taus)), heights, yerr=errors, **BAR)
    axis.set_xticks(range(len(taus)), [f"{letter}\n{t['value']:.2f}" for letter, t in taus.items()])
    axis.set(ylabel="tau, bonus token included", ylim=(1, max(heights) + 0.2 * (max(heights) - 1)), title=title)


def others(axis: Any, result: dict[str, Any]) -> None:
    """Other proposals at temperature 1 from the same weights, as marks on the bars."""
    ways = {"t1_argmax": "o"} | {name: "D" for arm in result["arms"].values() for name in arm if name.startswith("t1_k")}
    for setting, mark in ways.items():
        found = [(place, arm[setting]["tau"]) for place, arm in enumerate(result["arms"].values()) if setting in arm]
        label = "best choices" if setting == "t1_argmax" else f"drawn from {setting.removeprefix('t1_k')} candidates"
        places, heights = [place for place, _ in found], [t["value"] for _, t in found]
        axis.plot(places, heights, mark, ms=5, mfc="white", mec="black", mew=0.9, ls="none", label=label)
    axis.legend(fontsize=7, frameon=False, loc="upper right", ncols=2)


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
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained", width_ratios=(1.15, 1, 1))
    survival(left, result)
    bars(middle, result, "t0", "Acceptance length, temperature 0")
    bars(right, result, "t1", "Acceptance length, temperature 1, drawn")
    others(right, result)
    figure.savefig(a.out, dpi=110)
    print(f"{a.out}: {a.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
