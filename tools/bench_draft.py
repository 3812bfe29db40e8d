"""``dspine-export bench`` for a checkout that is not installed.

python -m tools.bench_draft --batches 1 8 32 --contexts 2000 --out bench.json

With `--plugins` the plans of `tools.bench_segments` join the table at the first context: the portable graph's as the engine, the fused
graph's segments in a line of their own. They run in a process of their own, after the rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspine_export.runtime.bench.measure import BenchRequest, run_benchmark
from dspine_export.runtime.bench.subjects import QWEN3_8B, random_drafter
from dspine_export.runtime.bench.table import report_lines

__all__ = ["QWEN3_8B", "random_drafter"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a bundle or drafter checkpoint: its shapes, a bundle's engine")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--compile-batches", type=int, nargs="*", default=[])
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--no-stages", action="store_true")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--plugins", type=Path, help="plugin libraries: measures the plans of the checkpoint --source")
    parser.add_argument("--plan-batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--work", type=Path, help="graphs and plans of bench_segments, built before or now")
    parser.add_argument("--graphs", type=Path, help="graphs exported before, see bench_segments")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.plugins is not None and arguments.source is None:
        parser.error("--plugins needs --source, the drafter checkpoint whose plans are measured")
    if min(*arguments.batches, *arguments.contexts, *arguments.plan_batches) < 1:
        parser.error("batches and contexts are positive numbers")
    if not arguments.out.parent.is_dir():
        parser.error(f"--out: {arguments.out.parent} is not a directory")
    request = BenchRequest(
        source=arguments.source,
        batches=tuple(arguments.batches),
        contexts=tuple(arguments.contexts),
        naive=not arguments.no_naive,
        compile_batches=tuple(arguments.compile_batches),
        stages=not arguments.no_stages,
        seconds=arguments.seconds,
    )

    def save(report: dict[str, Any]) -> None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    report = run_benchmark(request, lambda line: print(line, flush=True), save)
    if arguments.plugins is not None:
        try:
            add_plans(report["rows"], measured_plans(arguments))
        except subprocess.CalledProcessError as error:
            print(f"the plans are left out: tools.bench_segments ended with exit status {error.returncode}")
        save(report)
    print(*report_lines(report), *plan_lines(report["rows"]), sep="\n")


def measured_plans(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `tools.bench_segments` measured. Raises CalledProcessError after its own message."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "segments.json"
        command = [sys.executable, "-m", "tools.bench_segments", "--drafter", arguments.source, "--out", out]
        command += ["--plugins", arguments.plugins, "--context", arguments.contexts[0]]
        command += ["--batch", *arguments.plan_batches]
        for name in ("work", "graphs"):
            if getattr(arguments, name) is not None:
                command += [f"--{name}", getattr(arguments, name)]
        subprocess.run([str(part) for part in command], check=True)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def add_plans(rows: list[dict[str, Any]], measured: dict[str, Any]) -> None:
    """Gives DSpine's rows `engine`, the portable graph's plan, and `segments`, in place; times in microseconds."""
    for case in measured["cases"]:
        for row in rows:
            if (row["kind"], row["batch"], row["context"]) == ("DSpine", case["batch"], case["context"]):
                if "failed" in case:
                    row["skipped"] = row.get("skipped", {}) | {"engine": case["failed"]}
                    continue
                for key, own in (("portable", "engine"), ("segments", "segments")):
                    times = {"graph": case[key]["graph_us"], "stream": case[key]["stream_us"]}
                    tokens = {name: case[key][name] for name in ("tokens", "equal_to_eager", "equal_to_kernels")}
                    row[own] = {"name": measured["label"], **times, **tokens}


def plan_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a row that has plans."""
    for row in rows:
        if "segments" in row:
            parts = [
                f"{name} {plan['graph'] or plan['stream']:.0f} us{'' if plan['graph'] else ' uncaptured'}, "
                f"{plan['equal_to_eager']} of {plan['tokens']} tokens equal to the eager model's"
                for name, plan in (("segments and plugins", row["segments"]), ("portable plan", row["engine"]))
            ]
            yield f"DSpine batch {row['batch']} context {row['context']} in {row['engine']['name']}: {'; '.join(parts)}"


if __name__ == "__main__":
    main()
