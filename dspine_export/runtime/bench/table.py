"""The report as text: one line per cell, what DSpine adds to DFlash, and where the time goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

COLUMNS = (
    ("floor", "floor"),
    ("naive_graph", "naive"),
    ("compiled_graph", "compile"),
    ("ours", "ours"),
    ("ours_fp8", "fp8"),
    ("engine", "engine"),
    ("append", "append"),
    ("round_wall", "round"),
)


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """All of it. Times in microseconds; a dash where nothing was measured."""
    yield (
        f"{report['device']}, torch {report['torch']}: copy {report['copy_gb_s']:.0f} GB/s, "
        f"GEMM {report['gemm_tflop_s']:.0f} TFLOP/s; microseconds per draft pass"
    )
    yield (
        f"{'kind':<7}{'batch':>6}{'context':>9}"
        + "".join(f"{title:>10}" for _, title in COLUMNS)
        + f"{'ours/floor':>12}"
    )
    for row in report["rows"]:
        yield row_line(row)
    yield from _difference_lines(report["rows"])
    yield from _stage_lines(report["rows"])
    for row in report["rows"]:
        for name, reason in row["skipped"].items():
            yield f"{row['kind']} batch {row['batch']} context {row['context']}: {name} skipped, {reason}"


def row_line(row: dict[str, Any]) -> str:
    """One cell."""
    cells = "".join(f"{_text(_value(row, key)):>10}" for key, _ in COLUMNS)
    ratio = f"{row['ours'] / row['floor']['total']:.2f}" if "ours" in row else "-"
    return f"{row['kind']:<7}{row['batch']:>6}{row['context']:>9}{cells}{ratio:>12}"


def _value(row: dict[str, Any], key: str) -> float | None:
    if key == "append":
        return next((value for name, value in row.items() if name.startswith("append_")), None)
    value = row.get(key)
    if isinstance(value, dict):
        return value.get("total", value.get("graph", value.get("stream")))
    return value


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _difference_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    times = {
        (row["kind"], row["batch"], row["context"]): row.get("alternating", row["ours"])
        for row in rows
        if "ours" in row
    }
    for (kind, batch, context), dspine in times.items():
        plain = times.get(("DFlash", batch, context))
        if kind == "DSpine" and plain is not None:
            yield f"DSpine adds {dspine - plain:.0f} us ({dspine / plain - 1:+.1%}) to DFlash at batch {batch}, context {context}, by turns"


def _stage_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if "stages" in row:
            stages = ", ".join(f"{name} {us:.0f}" for name, us in row["stages"].items())
            yield f"{row['kind']} batch {row['batch']} context {row['context']} by stage (pass with minus without): {stages}"
