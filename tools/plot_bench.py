"""Figure of a draft-pass benchmark: microseconds beside the floor by batch, and how far above the floor a pass stays with the context.

    python -m tools.plot_bench --result tools/results/bench_draft_h200.json --out tools/results/bench_draft_h200.png

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

SERIES = {
    "naive_graph": ("torch modules in a CUDA graph", "#c9c9c9"),
    "compiled_graph": ("torch.compile", "#8c8c8c"),
    "ours": ("ours", "#d33682"),
    "ours_fp8": ("ours, float8 weights", "#e39ac0"),
}
KINDS = ("DFlash", "DSpine")
STYLES = {1: "-", 8: "--", 32: "-.", 128: ":"}


def with_repeats(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result; cells that were measured again, for reasons its note gives, with the later numbers."""
    later = {_cell(row): row for row in result.get("again", {}).get("rows", [])}
    return [row | later.get(_cell(row), {}) for row in result["rows"]]


def _cell(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["kind"], row["batch"], row["context"]


def rows_of(result: dict[str, Any], kind: str, context: int) -> list[dict[str, Any]]:
    """The measured rows of one drafter at one context, by batch."""
    found = [row for row in result["rows"] if row["kind"] == kind and row["context"] == context and "ours" in row]
    return sorted(found, key=lambda row: row["batch"])


def bars(axis: Any, result: dict[str, Any], kind: str, context: int) -> None:
    """One group per batch, one bar per way to run the pass, the floor as a line across the group."""
    rows = rows_of(result, kind, context)
    names = [name for name in SERIES if any(name in row for row in rows)]
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        at = [index - 0.4 + width * (place + 0.5) for index, row in enumerate(rows) if name in row]
        label, colour = SERIES[name]
        axis.bar(at, [row[name] for row in rows if name in row], width, color=colour, label=label)
    for index, row in enumerate(rows):
        floor = row["floor"]["total"]
        axis.hlines(floor, index - 0.45, index + 0.45, color="black", lw=1.4, label="floor" if index == 0 else None)
        axis.annotate(f"{row['ours'] / floor:.2f}x", (index, row["ours"]), ha="center", va="bottom", fontsize=7)
    axis.set_xticks(range(len(rows)), [f"batch {row['batch']}" for row in rows])
    axis.set(yscale="log", ylabel="microseconds a pass", title=f"{kind}, context {context:,}")
    axis.legend(fontsize=7, frameon=False, loc="upper left")


def contexts(axis: Any, result: dict[str, Any]) -> None:
    """Time over floor against the context, DSpine; one line per batch."""
    for batch, style in STYLES.items():
        rows = [row for row in result["rows"] if row["kind"] == "DSpine" and row["batch"] == batch and "ours" in row]
        rows.sort(key=lambda row: row["context"])
        if rows:
            ratios = [row["ours"] / row["floor"]["total"] for row in rows]
            axis.plot(
                [row["context"] for row in rows],
                ratios,
                style,
                color="#d33682",
                marker="o",
                ms=3,
                label=f"batch {batch}",
            )
    axis.axhline(1, color="black", lw=1)
    axis.set(xscale="log", xlabel="context, tokens", ylabel="time / floor", title="DSpine, ours")
    axis.legend(fontsize=7, frameon=False)


def main(argv: list[str] | None = None) -> None:
    """Draw one result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = json.loads(arguments.result.read_text())
    result["rows"] = with_repeats(result)
    first = result["rows"][0]["context"]  # where every way to run the pass was measured
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), width_ratios=[1, 1, 0.8])
    for axis, kind in zip(axes, KINDS, strict=False):
        bars(axis, result, kind, first)
    contexts(axes[2], result)
    figure.suptitle(f"One draft pass, {result['device']}, Qwen3-8B shapes, bfloat16", fontsize=10)
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
