"""The figure of a `dspine-export bench` report: time per draft pass against the floor.

pip install matplotlib
python -m tools.plot_bench tools/results/bench_draft_h200.json --out tools/results/bench_draft_h200.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

CONTENDERS = (
    ("naive_graph", "eager model in a CUDA graph", "#b9b4ad", "///"),
    ("compiled_graph", "torch.compile in a CUDA graph", "#8fa3b5", ""),
    ("ours", "our kernels", "#2a7f62", ""),
    ("ours_fp8", "our kernels, float8 weights", "#8ccfb0", ""),
)


def value(row: dict[str, Any], key: str) -> float:
    """Milliseconds; 0 where nothing was measured."""
    return float(row.get(key) or 0.0) / 1000


def draw_panel(axes: Any, rows: list[dict[str, Any]], label: str, title: str) -> None:
    """Grouped bars, one group a row, with the floor as a line across its group."""
    width = 0.8 / len(CONTENDERS)
    for index, (key, name, colour, hatch) in enumerate(CONTENDERS):
        at = [group - 0.4 + width * (index + 0.5) for group in range(len(rows))]
        axes.bar(at, [value(row, key) for row in rows], width, label=name, color=colour, hatch=hatch, edgecolor="white")
    for group, row in enumerate(rows):
        floor = row["floor"]["total"] / 1000
        axes.plot([group - 0.42, group + 0.42], [floor, floor], color="#c0392b", label="floor" if group == 0 else None)
        if row.get("ours"):
            text = f"{row['ours'] / row['floor']['total']:.2f}x"
            at_x = group - 0.4 + width * 2.5
            axes.annotate(text, (at_x, value(row, "ours")), ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(rows)), [f"{row[label]:,}" for row in rows])
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.3)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("sequences" if label == "batch" else "context tokens", fontsize=8)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    report = json.loads(a.report.read_text())
    rows = [row for row in report["rows"] if "floor" in row]
    first, smallest = min(row["context"] for row in rows), min(row["batch"] for row in rows)
    figure, panels = pyplot.subplots(1, 3, figsize=(11, 3.4), constrained_layout=True)
    for axes, kind in zip(panels, ("DFlash", "DSpine"), strict=False):
        chosen = [row for row in rows if row["kind"] == kind and row["context"] == first]
        draw_panel(axes, chosen, "batch", f"{kind}, context {first:,}")
    chosen = [row for row in rows if row["kind"] == "DSpine" and row["batch"] == smallest]
    draw_panel(panels[2], chosen, "context", f"DSpine, {smallest} sequence")
    panels[0].set_ylabel("milliseconds per draft pass", fontsize=8)
    panels[0].legend(fontsize=7, loc="upper left")
    figure.suptitle(f"{report['device']}, torch {report['torch']}, Qwen3-8B drafter shapes, bfloat16", fontsize=9)
    figure.savefig(a.out, dpi=150)


if __name__ == "__main__":
    main()
