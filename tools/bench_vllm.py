"""Serving throughput in vLLM at a real model's shapes: no speculation, vLLM's DFlash, DSpine, under synthetic acceptance.

    python -m tools.bench_vllm --gpus 0 1 --out bench/              # every configuration, two at a time
    python -m tools.bench_vllm --only dspine --gpus 0 --out bench/
    python -m tools.bench_vllm --only dspine dflash --turns bench/turns --out bench/ --batches 1 8 32 \\
        --engine '{"kv_cache_memory_bytes": 10200547328, "gpu_memory_utilization": 0.18}'
    python -m tools.bench_vllm --table bench/

Dummy weights (no checkpoint needed) and a fixed acceptance length compare what drafting costs. That the drafter drafts at all is shown in
the measured engine itself: afterwards its weights are overwritten with meaningful random ones, and the tokens that its CUDA graphs draft
are compared with the torch model's on the same target states (`vllm_rounds`). One process and one engine per configuration; with --turns
all of them on one device at a time, which measure alternately: then they must fit into its memory together.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.turns import turn, wait_for_start
from tools.vllm_engine import (
    Timed,
    draft_graph_us,
    model_runner,
    one_process,
    random_prompts,
    set_synthetic_length,
    side_by_side,
    timed_batch,
    together,
)
from tools.vllm_profile import profile_steps

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000, "layers": 36, "taps": [1, 9, 17, 25, 33],
        "draft_layers": 5, "rank": 1024, "message": 512, "mask": 151669,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 4096, "rope_theta": 10000, "layers": 3, "taps": [0, 2],
        "draft_layers": 2, "rank": 64, "message": 32, "mask": 511,
    },
}  # fmt: skip
BLOCK = 16
PROFILED_TOKENS = 96


@dataclass(frozen=True)
class Configuration:
    """method: vLLM's, None without speculation; lengths: synthetic acceptance lengths; quantization: of the drafter."""

    method: str | None = None
    lengths: tuple[float, ...] = ()
    quantization: str | None = None


CONFIGURATIONS = {
    "dspine": Configuration("dspine", (4.82, 3.77)),
    "dspine-fp8": Configuration("dspine", (4.82, 3.77), "fp8"),
    "dflash": Configuration("dflash", (3.77,)),
    "dflash-fp8": Configuration("dflash", (3.77,), "fp8"),
    "none": Configuration(),
}
# Columns of the table that are one column over another.
RATIOS = [(f"{over}({length})", f"{base}(3.77)") for over, length, base in (
    ("dspine", 4.82, "dflash"), ("dspine", 3.77, "dflash"),
    ("dspine-fp8", 4.82, "dflash"), ("dspine-fp8", 3.77, "dflash"),
    ("dspine-fp8", 4.82, "dflash-fp8"), ("dspine-fp8", 3.77, "dflash-fp8"),
    ("dflash-fp8", 3.77, "dflash"),
)]  # fmt: skip
FIGURES = ("tokens_per_s", "tokens_per_s_at_length", "decode_tokens_per_s")
# Multiples of one request's rows up to the largest batch, and single rows for the target alone.
CAPTURE_SIZES = [1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), *range(640, 1025, 128)]


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, help="directory for one JSON per configuration and the merged table")
    add("--table", type=Path, help="only merge what is in this directory")
    add("--only", choices=sorted(CONFIGURATIONS), nargs="+", default=list(CONFIGURATIONS))
    add("--gpus", nargs="+", default=["0"], help="CUDA devices; configurations run side by side, one per device")
    add("--worker", choices=sorted(CONFIGURATIONS), help=argparse.SUPPRESS)
    add("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    add("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    add("--prompt", type=int, default=1024, help="prompt tokens")
    add("--tokens", type=int, default=512, help="generated tokens")
    add("--repeats", type=int, default=2)
    add("--profile", type=int, nargs="*", default=[], help="batches whose decoding step is taken apart at the end")
    add("--dtype", default="bfloat16")
    add("--engine", type=_engine_arguments, default={}, help="further arguments of vllm.LLM, JSON")
    add(
        "--turns",
        type=Path,
        help="start all engines on the first of --gpus and measure by turns; an empty directory for their queue",
    )
    a = parser.parse_args(argv)
    if a.table is not None:
        if not any((a.table / f"{name}.json").is_file() for name in CONFIGURATIONS):
            parser.error(f"--table {a.table}: expected a directory with results of this tool ({', '.join(CONFIGURATIONS)}; .json)")
    elif a.out is None:
        parser.error("--out is required: a directory for the results")
    if min(*a.batches, *a.profile, a.prompt, a.tokens, a.repeats) < 1:
        parser.error("batches, tokens and repeats are positive numbers")
    return a


def _engine_arguments(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected an object of arguments, got {text}")
    return found


def model_files(folder: Path, shape: dict[str, Any], dtype: str) -> tuple[Path, Path, Path]:
    """Configuration-only directories of target, DFlash drafter and DSpine drafter."""
    own = ("layers", "taps", "draft_layers", "rank", "message", "mask")
    base = {key: value for key, value in shape.items() if key not in own} | {
        "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "tie_word_embeddings": False, "dtype": dtype, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    draft = base | {
        "num_hidden_layers": shape["draft_layers"], "layer_types": ["full_attention"] * shape["draft_layers"],
        "block_size": BLOCK, "num_target_layers": shape["layers"],
        "dflash_config": {"mask_token_id": shape["mask"], "target_layer_ids": shape["taps"]},
    }  # fmt: skip
    documents = {
        "target": base | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": shape["layers"]},
        "dflash": draft | {"architectures": ["DFlashDraftModel"]},
        "dspine": draft | {
            "architectures": ["DSpineDraftModel"], "is_causal": True,
            "dspine_config": {"transfer_rank": shape["rank"], "message_size": shape["message"], "top_k": 16},
        },
    }  # fmt: skip
    for name, document in documents.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(document))
    return folder / "target", folder / "dflash", folder / "dspine"


def measure(name: str, a: argparse.Namespace) -> dict[str, Any]:
    """One engine: every acceptance length, every batch; DSpine's drafts against the torch model at the end."""
    one_process()
    from tools.vllm_check import check_drafts

    chosen = CONFIGURATIONS[name]
    started = time.perf_counter()
    llm = start_engine(name, a)
    result: dict[str, Any] = {"configuration": name, "init_s": round(time.perf_counter() - started, 1), "rows": []}
    write(a.out / f"{name}.json", result)
    timed_batch(llm, prompts_of(max(a.batches), 7, a), 24)
    if a.turns is not None:
        wait_for_start(a.turns, name)
    for length in chosen.lengths or (None,):
        if length is not None:
            set_synthetic_length(model_runner(llm), length)
        for batch in a.batches:
            row = {"batch": batch, "synthetic_length": length} | measure_batch(llm, batch, length, a)
            print(name, row, flush=True)
            result["rows"].append(row)
            write(a.out / f"{name}.json", result)
    with turn(a.turns):
        for batch in a.profile:  # before the check, which gives DSpine other weights
            result.setdefault("profile", {})[batch] = profile_steps(llm, prompts_of(batch, 11, a), PROFILED_TOKENS)
            write(a.out / f"{name}.json", result)
        if chosen.lengths:
            result["draft_graph_us"] = draft_graph_us(model_runner(llm))
            print("graph", name, result["draft_graph_us"], flush=True)
        if chosen.method == "dspine":
            result |= check_drafts(llm, a.prompt, SHAPES[a.shape]["vocab_size"], max(a.batches))
            print("drafts", {key: result[key] for key in result if key.startswith("drafts")}, flush=True)
        result |= machine()
    write(a.out / f"{name}.json", result)
    return result


def measure_batch(llm: Any, batch: int, length: float | None, a: argparse.Namespace) -> dict[str, Any]:
    """The best run of a batch, what its prefill takes, and what all runs say of the nominal acceptance length; every run is a turn."""

    def run(seed: int, tokens: int) -> Timed:
        with turn(a.turns):
            return timed_batch(llm, prompts_of(batch, seed, a), tokens)

    runs = [run(100 * batch + repeat, a.tokens) for repeat in range(a.repeats + (batch == 1))]
    best = max(runs, key=lambda one: one.tokens_per_s)
    prefill = min(run(5000 * batch + repeat, 1).seconds for repeat in range(2))
    row = {
        "acceptance_length": best.acceptance_length, "tokens_per_s": round(best.tokens_per_s, 1),
        "all": [round(one.tokens_per_s, 1) for one in runs], "lengths": [one.acceptance_length for one in runs],
        "prefill_s": round(prefill, 4), "decode_tokens_per_s": round((best.tokens - batch) / (best.seconds - prefill), 1),
    }  # fmt: skip
    return row if length is None else row | at_length(runs[-a.repeats :], batch, prefill, length)  # less the first of a single request


def at_length(runs: list[Timed], batch: int, prefill: float, length: float) -> dict[str, float]:
    """Milliseconds of a step over all runs, and the tokens per second that it makes at exactly that acceptance length.

    Synthetic acceptance is drawn: over the few hundred steps of a run the realised length is off by a percent or so, which is as much as
    the engines differ.
    """
    drafted = [one for one in runs if one.acceptance_length and one.tokens > batch]
    if not drafted:
        return {}
    steps = sum((one.tokens - batch) / batch / (one.acceptance_length or 1) for one in drafted)
    step = sum(one.seconds - prefill for one in drafted) / steps
    tokens = drafted[0].tokens
    seconds = prefill + (tokens - batch) / batch / length * step
    return {"step_ms": round(1e3 * step, 3), "tokens_per_s_at_length": round(tokens / seconds, 1)}


def prompts_of(batch: int, seed: int, a: argparse.Namespace) -> list[dict[str, list[int]]]:
    """The same for every engine."""
    return random_prompts(batch, a.prompt, seed, SHAPES[a.shape]["vocab_size"])


def start_engine(name: str, a: argparse.Namespace) -> Any:
    """The engine of one configuration, dummy weights everywhere."""
    from vllm import LLM

    chosen = CONFIGURATIONS[name]
    target, *drafters = model_files(a.out / f"models_{name}", SHAPES[a.shape], a.dtype)
    speculative = None
    if chosen.method is not None:
        speculative = {
            "method": chosen.method, "model": str(dict(zip(("dflash", "dspine"), drafters, strict=True))[chosen.method]),
            "num_speculative_tokens": BLOCK - 1, "quantization": chosen.quantization,
            "rejection_sample_method": "synthetic", "synthetic_acceptance_length": chosen.lengths[0],
        }  # fmt: skip
    largest = max(a.batches) * (BLOCK if chosen.lengths else 1)
    options = {
        "model": str(target), "speculative_config": speculative, "load_format": "dummy", "skip_tokenizer_init": True,
        "dtype": a.dtype, "max_model_len": 4096, "max_num_seqs": max(a.batches), "gpu_memory_utilization": 0.6,
        "enable_prefix_caching": False, "disable_log_stats": False,
        "compilation_config": {"cudagraph_capture_sizes": [size for size in CAPTURE_SIZES if size <= largest]},
    }  # fmt: skip
    return LLM(**options | a.engine)


def run_all(a: argparse.Namespace) -> int:
    """Subprocesses side by side, one per device or by turns; a failed configuration leaves its log and does not stop the others."""
    shared = ["--shape", a.shape, "--prompt", str(a.prompt), "--tokens", str(a.tokens), "--repeats", str(a.repeats),
              "--dtype", a.dtype, "--engine", json.dumps(a.engine), "--batches", *map(str, a.batches),
              "--profile", *map(str, a.profile)]  # fmt: skip
    command = [sys.executable, "-m", "tools.bench_vllm", "--out", str(a.out), *shared]
    if a.turns is None:
        failed = side_by_side({name: [*command, "--worker", name] for name in a.only}, a.gpus, a.out)
    else:
        command += ["--turns", str(a.turns), "--worker"]
        failed = together({name: [*command, name] for name in a.only}, a.gpus[0], a.out, a.turns)
    print(table(a.out))
    if failed:
        print(f"bench_vllm: {failed} configurations did not end well; why is at the end of {a.out}/NAME.log", file=sys.stderr)
    return 1 if failed else 0


def write(path: Path, document: dict[str, Any]) -> None:
    """What is measured so far survives a run that is cut short."""
    path.write_text(json.dumps(document, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Where this ran."""
    import torch
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": device, "torch": torch.__version__, "vllm": vllm.__version__}


def table(folder: Path) -> str:
    """Tokens per second by batch, with and without the prefill, and DSpine over DFlash; also written as table.json."""
    tables = {figure: _figure_table(folder, figure) for figure in FIGURES}
    write(folder / "table.json", tables)
    return json.dumps(tables, indent=1)


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"bench_vllm: error: {path} is not a result of this tool ({error!r}); remove it or measure again") from None
    return found


def _figure_table(folder: Path, figure: str) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for name in CONFIGURATIONS:
        path = folder / f"{name}.json"
        for row in _rows(path) if path.is_file() else ():
            label = name if row["synthetic_length"] is None else f"{name}({row['synthetic_length']:g})"
            if figure in row:
                rows.setdefault(row["batch"], {})[label] = row[figure]
    for found in rows.values():
        for label, base in RATIOS:
            if label in found and base in found:
                found[f"{label} / {base}"] = round(found[label] / found[base], 4)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    a = parse_arguments(argv)
    if a.table is not None:
        print(table(a.table))
        return 0
    a.out.mkdir(parents=True, exist_ok=True)
    if a.worker is None:
        if a.turns is not None:
            a.turns.mkdir(parents=True, exist_ok=True)
            if any(a.turns.iterdir()):
                raise SystemExit(f"bench_vllm: error: --turns {a.turns} is not empty: give a new directory")
        return run_all(a)
    measure(a.worker, a)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
