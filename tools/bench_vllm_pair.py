"""A trained pair served by vLLM: real acceptance, tokens per second and equality of greedy output against the target alone.

    python -m tools.bench_vllm_pair --target TARGET --drafter DRAFTER [--drafter DFLASH_DRAFTER] --prompts tests/data/prompts/*.jsonl \\
        --gpus 0 1 --out pair/
    python -m tools.bench_vllm_pair --table pair/

Every drafter and the target alone get an engine and a process of their own, on the same prompts. A drafter's ``architectures`` say how it
is served: ``dspine``, or vLLM's ``dflash``. In bfloat16 near-ties may part the outputs; in float32 they must not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.vllm_engine import one_process, side_by_side, timed_batch

ALONE = "target"
METHODS = {"DSpineDraftModel": "dspine", "DFlashDraftModel": "dflash"}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path)
    add("--drafter", type=Path, action="append", default=[], help="once per drafter")
    add(
        "--quantization",
        nargs="+",
        default=[],
        help="vLLM's words; every drafter is also served so, under the name METHOD-WORD",
    )
    add("--prompts", type=Path, nargs="+", help="prompt files")
    add("--out", type=Path, help="directory for one JSON per engine and table.json")
    add("--table", type=Path, help="only merge what is in this directory")
    add("--worker", help=argparse.SUPPRESS)
    add("--gpus", nargs="+", default=["0"], help="CUDA devices; engines run side by side, one per device")
    add("--limit", type=int, default=8, help="prompts of each file")
    add("--batches", type=int, nargs="+", default=[1, 8])
    add("--max-new-tokens", type=int, default=256)
    add("--dtype", default="bfloat16")
    add("--engine", type=json.loads, default={}, help="further arguments of vllm.LLM, JSON")
    return parser.parse_args(argv)


def method_of(drafter: Path) -> tuple[str, int]:
    """How vLLM serves a drafter, and how many tokens it drafts."""
    config = json.loads((drafter / "config.json").read_text())
    names = config["architectures"]
    method = next((METHODS[name] for name in names if name in METHODS), None)
    if method is None:
        raise SystemExit(f"{drafter}: architectures {names}, expected one of {sorted(METHODS)}")
    return method, config["block_size"] - 1


def served(drafter: Path, method: str, target: Path, folder: Path) -> Path:
    """What vLLM loads: a DSpine checkpoint is written as ``build --target vllm`` writes it, everything else is taken as it is."""
    if method != "dspine" or "sample_from_anchor" in json.loads((drafter / "config.json").read_text()):
        return drafter
    from dspine_export.checkpoint.load import open_checkpoint
    from dspine_export.checkpoint.target import read_target
    from dspine_export.vllm.files import write_files

    folder.mkdir(exist_ok=True)
    return write_files(folder, open_checkpoint(drafter), read_target(target), "bfloat16", str(target))


def labels(drafters: list[Path], quantization: Sequence[str] = ()) -> dict[str, tuple[Path, str | None]]:
    """Drafter and quantization by name: its method, numbered from the second of its kind, and the word behind it."""
    plain: dict[str, Path] = {}
    for drafter in drafters:
        method, _ = method_of(drafter)
        same = sum(name.split("-")[0] == method for name in plain)
        plain[method if same == 0 else f"{method}-{same + 1}"] = drafter
    named: dict[str, tuple[Path, str | None]] = {name: (drafter, None) for name, drafter in plain.items()}
    return named | {f"{name}-{word}": (drafter, word) for name, drafter in plain.items() for word in quantization}


def measure(name: str, a: argparse.Namespace) -> dict[str, Any]:
    """One engine over all prompts, once per batch size."""
    one_process()
    from vllm import LLM

    from tools.training.prompts import encode_prompts, load_tokenizer, read_prompts

    tokenizer = load_tokenizer(a.target)
    rows = [row for path in a.prompts for row in read_prompts(path)[: a.limit]]
    prompts = [{"prompt_token_ids": ids} for ids in encode_prompts(tokenizer, rows)]
    speculative = None
    if name != ALONE:
        drafter, quantization = labels(a.drafter, a.quantization)[name]
        method, drafted = method_of(drafter)
        folder = served(drafter, method, a.target, a.out / f"served-{name}")
        speculative = {
            "method": method,
            "model": str(folder),
            "num_speculative_tokens": drafted,
            "quantization": quantization,
        }
    started = time.perf_counter()
    options = {
        "model": str(a.target), "speculative_config": speculative, "dtype": a.dtype, "max_model_len": 2048,
        "max_num_seqs": max(a.batches), "enable_prefix_caching": False, "disable_log_stats": False,
    }  # fmt: skip
    if "cpu" not in torch_build():  # a stated cache size: vLLM's measurement of free memory fails on a device in use
        options |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 4 << 30}
    llm = LLM(**options | a.engine)
    result: dict[str, Any] = {"configuration": name, "init_s": round(time.perf_counter() - started, 1), "rows": []}
    timed_batch(llm, prompts[: max(a.batches)], 16)
    for batch in a.batches:
        runs = [
            timed_batch(llm, prompts[at : at + batch], a.max_new_tokens, stop_at_end=True)
            for at in range(0, len(prompts), batch)
        ]
        row = _summary(batch, runs)
        print(name, row, flush=True)
        result["rows"].append(row)
        result["outputs"] = [tokens for run in runs for tokens in run.outputs]
        (a.out / f"{name}.json").write_text(json.dumps(result) + "\n")
    return result


def torch_build() -> str:
    """``cpu``, or the accelerator torch was built for; asked of the version, because asking CUDA would initialise it."""
    import torch

    return "cpu" if torch.version.cuda is None else f"cuda {torch.version.cuda}"


def _summary(batch: int, runs: list[Any]) -> dict[str, Any]:
    """Totals over the prompts; the acceptance length weighs every target call alike."""
    tokens, seconds = sum(run.tokens for run in runs), sum(run.seconds for run in runs)
    steps = sum(run.tokens / run.acceptance_length for run in runs if run.acceptance_length)
    return {
        "batch": batch,
        "tokens_per_s": round(tokens / seconds, 1),
        "tokens": tokens,
        "acceptance_length": round(tokens / steps, 3) if steps else None,
    }


def table(folder: Path) -> str:
    """Rows of all engines, speed-ups over the target alone, and how many outputs equal its; also written as table.json."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.stem != "table"}
    alone = found.get(ALONE)
    document: dict[str, Any] = {}
    for name, result in found.items():
        entry: dict[str, Any] = {"rows": result["rows"]}
        if alone is not None and name != ALONE:
            base = {row["batch"]: row["tokens_per_s"] for row in alone["rows"]}
            entry["speed_up"] = {
                row["batch"]: round(row["tokens_per_s"] / base[row["batch"]], 3)
                for row in result["rows"]
                if row["batch"] in base
            }
            pairs = list(zip(result["outputs"], alone["outputs"], strict=True))
            entry["outputs_equal"] = f"{sum(mine == other for mine, other in pairs)} of {len(pairs)}"
        document[name] = entry
    text = json.dumps(document, indent=1)
    (folder / "table.json").write_text(text + "\n")
    return text


def run_all(a: argparse.Namespace, arguments: list[str]) -> int:
    """Subprocesses side by side, one per device."""
    command = [sys.executable, "-m", "tools.bench_vllm_pair", *arguments, "--worker"]
    names = [ALONE, *labels(a.drafter, a.quantization)]
    failed = side_by_side({name: [*command, name] for name in names}, a.gpus, a.out)
    print(table(a.out))
    return 1 if failed else 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    a = parse_arguments(arguments)
    if a.table is not None:
        print(table(a.table))
        return 0
    if None in (a.target, a.prompts, a.out):
        raise SystemExit("bench_vllm_pair: error: --target, --prompts and --out are required")
    a.out.mkdir(parents=True, exist_ok=True)
    if a.worker is None:
        return run_all(a, arguments)
    measure(a.worker, a)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
