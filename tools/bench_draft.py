"""``dspine-export bench`` for a checkout that is not installed.

python -m tools.bench_draft --batches 1 8 32 --contexts 2000 --out bench.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    request = BenchRequest(
        source=arguments.source,
        batches=tuple(arguments.batches),
        contexts=tuple(arguments.contexts),
        naive=not arguments.no_naive,
        compile_batches=tuple(arguments.compile_batches),
        stages=not arguments.no_stages,
        seconds=arguments.seconds,
    )
    report = run_benchmark(request, lambda line: print(line, flush=True))
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(*report_lines(report), sep="\n")


if __name__ == "__main__":
    main()
