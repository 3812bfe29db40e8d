"""Measures the compiler: export time and memory, engine build time and memory, and the whole `build` of a pair.

    python tools/bench_build.py qwen3-8b                # random weights at Qwen3-8B shapes: fused ONNX, then both plans
    python tools/bench_build.py build CKPT TARGET       # `dspine-export build` of a real pair, engine included

Each stage runs in a process of its own. Memory is read from the kernel: ``peak_rss`` is everything resident, mapped weight files
included; ``peak_private`` leaves out the file pages, which the kernel can drop at any time. Both are also given over the bare imports.
On a busy machine ``cpu_seconds`` (all threads) says more than the wall time; the load average at the start is recorded.
Writes ``tools/results/build_<name>.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tools" / "results"
SAMPLE_SECONDS = 0.01
TARGETS = {
    "export_seconds": 60,
    "export_peak_over_import_bytes": 1_000_000_000,
    "engine_seconds": 60,
    "peak_over_plan": 3.2,
}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for shape in ("qwen3-8b", "qwen3-4b", "tiny"):
        shaped = commands.add_parser(shape)
        shaped.add_argument("--work", type=Path, help="folder for the checkpoint and outputs, kept; default: temporary")
        shaped.add_argument("--out", type=Path, default=RESULTS / f"build_{shape.replace('-', '_')}.json")
    whole = commands.add_parser("build")
    whole.add_argument("checkpoint", type=Path)
    whole.add_argument("target", type=Path)
    whole.add_argument("--out", type=Path, default=RESULTS / "build_example.json")
    stage = commands.add_parser("stage")
    stage.add_argument("name", choices=sorted(STAGES))
    stage.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "stage":
        print(json.dumps(STAGES[options.name](options.folder)))
        return 0
    record = build_pair(options) if options.command == "build" else shape_run(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    return 0


def shape_run(options: argparse.Namespace) -> dict[str, Any]:
    """Generate the checkpoint unless ``--work`` holds it, then export and build, each in a fresh process."""
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.work or Path(temporary)
        if not (folder / "pair").exists():
            generator = [sys.executable, str(ROOT / "tools" / "make_random_drafter.py")]
            subprocess.run(
                [*generator, "--shape", options.command, "--out", str(folder / "pair")], check=True, stdout=sys.stderr
            )
        record = provenance() | {"shape": options.command, "dtype": "bfloat16", "targets": TARGETS}
        return record | {name: run_stage(name, folder) for name in STAGES}


def build_pair(options: argparse.Namespace) -> dict[str, Any]:
    """Wall time of the command line's `build`, verification included."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "bundle"
        command = [
            sys.executable,
            "-m",
            "dspine_export",
            "build",
            str(options.checkpoint),
            "--target-model",
            str(options.target),
        ]
        command += ["--target", "trtllm", "-o", str(out)]
        started = time.monotonic()
        subprocess.run(command, check=True, stdout=sys.stderr)
        seconds = time.monotonic() - started
        engines = [json.loads(path.read_text()) for path in out.glob("engines/*/build.json")]
        return provenance() | {
            "seconds": round(seconds, 2),
            "bundle_bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
            "engines": [engine_figures(engine) for engine in engines],
        }


def run_stage(name: str, folder: Path) -> dict[str, Any]:
    """One stage in a process of its own; what it prints last is its record."""
    command = [sys.executable, str(Path(__file__).resolve()), "stage", name, str(folder)]
    started = time.monotonic()
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    record: dict[str, Any] = json.loads(output.splitlines()[-1])
    return record | {"process_seconds": round(time.monotonic() - started, 2)}


def export_stage(folder: Path) -> dict[str, Any]:
    """Checkpoint to both fused ONNX entries, weights file included."""
    import shutil

    from dspine_export.checkpoint.load import open_checkpoint
    from dspine_export.checkpoint.target import read_target
    from dspine_export.lowering.onnx_export import export_onnx

    out = folder / "onnx"
    shutil.rmtree(out, ignore_errors=True)

    def export() -> None:
        checkpoint, target = open_checkpoint(folder / "pair" / "drafter"), read_target(folder / "pair" / "target")
        export_onnx(checkpoint, target, out, dtype="bfloat16", form="fused")

    figures = measured(export)
    return figures | {"files_bytes": {path.name: path.stat().st_size for path in sorted(out.iterdir())}}


def engine_stage(folder: Path) -> dict[str, Any]:
    """Both plans from the exported graphs, our plugins inside."""
    import onnx  # noqa: F401  # part of the bare import, as are the bindings
    from dspine_plugins import build_plugins, find_plugins

    from dspine_export.lowering.engine import EngineReport, ProfileSpec, build_engines
    from dspine_export.lowering.engine.backend import open_backend
    from dspine_export.lowering.engine.memory import BASE_BYTES, PEAK_FACTOR, available_memory_bytes

    library = (find_plugins() or build_plugins(folder / "plugins")).path
    open_backend("auto")
    reports: list[EngineReport] = []
    available = available_memory_bytes()
    figures = measured(
        lambda: reports.append(build_engines(folder / "onnx", folder, profile=ProfileSpec(), plugin_library=library))
    )
    report = reports[0]
    largest = max(plan.weight_bytes for plan in report.plans)
    plan_bytes = sum(plan.size_bytes for plan in report.plans)
    return figures | {
        "preflight": {"needs_bytes": int(largest * PEAK_FACTOR) + BASE_BYTES, "available_bytes": available},
        "plan_bytes": plan_bytes,
        "peak_rss_over_plans": round(figures["peak_rss_bytes"] / plan_bytes, 3),
        "engine": engine_figures(report.to_json()),
    }


def portable_stage(folder: Path) -> dict[str, Any]:
    """The float32 portable graphs, the fused draft graph's twin and their weights."""
    import shutil

    from dspine_export.checkpoint.load import open_checkpoint
    from dspine_export.checkpoint.target import read_target
    from dspine_export.lowering.portable import export_portable

    out = folder / "portable"
    shutil.rmtree(out, ignore_errors=True)

    def export() -> None:
        checkpoint, target = open_checkpoint(folder / "pair" / "drafter"), read_target(folder / "pair" / "target")
        export_portable(checkpoint, target, out, folder / "onnx")

    figures = measured(export)
    return figures | {"files_bytes": {path.name: path.stat().st_size for path in sorted(out.iterdir())}}


def verify_stage(folder: Path) -> dict[str, Any]:
    """Those graphs in ONNX Runtime against the torch model, on a target whose two matrices are random, not the generator's zeros."""
    import torch
    from safetensors.torch import save_file

    from dspine_export.checkpoint.load import open_checkpoint
    from dspine_export.checkpoint.target import read_target
    from dspine_export.lowering.verify import VerificationReport, require_passed, verify_onnx

    checkpoint, dense = open_checkpoint(folder / "pair" / "drafter"), folder / "pair" / "dense-target"
    if not dense.exists():
        dense.mkdir()
        shape = (checkpoint.config.vocab_size, checkpoint.config.hidden_size)
        matrices = {
            n: torch.randn(shape, dtype=torch.bfloat16) for n in ("model.embed_tokens.weight", "lm_head.weight")
        }
        save_file(matrices, dense / "model.safetensors")
        (dense / "config.json").write_bytes((folder / "pair" / "target" / "config.json").read_bytes())
        del matrices
    reports: list[VerificationReport] = []
    cases = ((1, 33), (2, 7))
    figures = measured(
        lambda: reports.append(verify_onnx(checkpoint, read_target(dense), folder / "portable", cases=cases))
    )
    require_passed(reports[0])
    report = reports[0]
    return figures | {
        "cases": cases,
        "tokens": report.tokens,
        "near_ties": report.near_ties,
        "largest_error": report.largest_error,
        "graphs": report.graphs,
    }


STAGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "export": export_stage,
    "engine": engine_stage,
    "portable": portable_stage,
    "verify": verify_stage,
}


def engine_figures(engine: dict[str, Any]) -> dict[str, Any]:
    """The figures of one build.json, without shapes and names."""
    keys = ("entry", "size_bytes", "weight_bytes", "seconds", "peak_rss_bytes", "plan_plugins")
    plans = [
        {key: plan[key] for key in keys}
        | {"network_layers": plan["network"]["layer_types"], "engine_layers": plan["engine"]["layer_types"]}
        for plan in engine["plans"]
    ]
    names = ("builder", "version", "sm", "compute_capabilities", "profile")
    return {key: engine[key] for key in names} | {"plans": plans}


def measured(action: Callable[[], object]) -> dict[str, Any]:
    """Wall time of ``action`` and the memory of this process during it, after everything was imported."""
    before, peaks, stop = memory_bytes(), {"rss": 0, "private": 0}, threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            now = memory_bytes()
            for key in peaks:
                peaks[key] = max(peaks[key], now[key])

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    started, cpu = time.monotonic(), time.process_time()
    try:
        action()
    finally:
        seconds, cpu = time.monotonic() - started, time.process_time() - cpu
        stop.set()
        sampler.join()
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
        "import_rss_bytes": before["rss"],
        "peak_rss_bytes": peaks["rss"],
        "peak_private_bytes": peaks["private"],
        "peak_rss_over_import_bytes": peaks["rss"] - before["rss"],
        "peak_private_over_import_bytes": peaks["private"] - before["private"],
    }


def memory_bytes() -> dict[str, int]:
    """Resident memory of this process: all of it, and without pages of files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    size = {key: int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon")}
    return {"rss": size["VmRSS"], "private": size["RssAnon"]}


def provenance() -> dict[str, Any]:
    """Command, machine, date and commit of a record."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "command": " ".join(["python", "tools/bench_build.py", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or None,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": int(total.split()[1]) * 1024,
            "load_average": [round(value, 2) for value in os.getloadavg()],
            "gpu": None,
            "python": platform.python_version(),
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())
