"""Runs a plan on this machine's GPU through the runtime's own executor and compares every token with the torch model.

    python -m tools.check_plan_gpu --bundle OUT --io tests/golden/b8_gqa/io.safetensors --graphs portable --out result.json

With `--graphs portable` the plans are built from the bundle's float32 graphs, which hold no plugin: the only ones that TensorRT-RTX 1.6.1
accepts, the last version that runs on compute capability 9.0 (an architecture it reports as unsupported). Prints what was executed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dspine_export.bundle import EngineEntry
from dspine_export.lowering.engine import ProfileSpec, Range, build_engines
from dspine_export.lowering.engine.backend import open_backend
from dspine_export.lowering.engine.full_precision import VARIABLE
from dspine_export.model.drafter import Drafter
from dspine_export.model.loading import load_checkpoint
from dspine_export.recipes import Profile
from dspine_export.runtime.plan_runner import load_plan
from dspine_export.runtime.tensorrt_executor import TensorrtExecutor

CASES = ((1, 5), (2, 40), (3, 64))


def compare(drafter: Drafter, executor: TensorrtExecutor, batch: int, rows: int, seed: int) -> dict[str, Any]:
    """One random state, greedy and sampled rows: token differences and the largest score difference."""
    config, generator = drafter.config, torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(batch, rows, config.num_taps * config.hidden_size, device="cuda", generator=generator)
    counts = torch.randint(1, rows + 1, (batch,), device="cuda", generator=generator)
    anchors = torch.randint(0, config.vocab_size, (batch,), device="cuda", generator=generator)
    heat = torch.arange(batch, device="cuda").remainder(2).float()
    uniforms = torch.rand(batch, config.block_size - 1, device="cuda", generator=generator)
    reference, state = drafter.new_state(batch, rows), executor.new_state(batch, rows)
    drafter.append_context(reference, hidden, counts)
    executor.append_context(state, hidden, counts)
    want = drafter.draft_from(reference, anchors, heat, uniforms=uniforms)
    got = executor.draft_from(state, anchors, heat, uniforms)
    torch.cuda.synchronize()
    assert want.transition_scores is not None and got.transition_scores is not None
    assert want.candidate_ids is not None and got.candidate_ids is not None
    return {
        "batch": batch,
        "rows": rows,
        "tokens": want.tokens.numel(),
        "different_tokens": int(want.tokens.ne(got.tokens).sum()),
        "different_candidates": int((want.candidate_ids.ne(got.candidate_ids)).sum()),
        "largest_score_error": float((want.transition_scores - got.transition_scores).abs().max()),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument(
        "--io", type=Path, required=True, help="safetensors with embed_tokens.weight and lm_head.weight"
    )
    parser.add_argument("--graphs", default="portable")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    tables = {name: tensor.cuda() for name, tensor in load_file(arguments.io).items() if name.endswith(".weight")}
    checkpoint = load_checkpoint(arguments.drafter)
    drafter = checkpoint.bind(embed_tokens=tables["embed_tokens.weight"], lm_head=tables["lm_head.weight"])
    backend = open_backend("tensorrt-rtx")
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        spec = ProfileSpec(batch=Range(1, 1, 4), context=Range(1, 64, 256), tokens=Range(1, 16, 64))
        report = build_engines(
            arguments.bundle / arguments.graphs, Path(folder), profile=spec, plugin_library=None, builder="tensorrt-rtx"
        )
        seconds = time.monotonic() - started
        plans = {p.entry: load_plan(backend, report.folder / p.path, torch.device("cuda")) for p in report.plans}
        profile = Profile.model_validate(
            {
                "batch": {"min": 1, "opt": 1, "max": 4},
                "context": {"min": 1, "opt": 64, "max": 256},
                "tokens": {"min": 1, "opt": 16, "max": 64},
            }
        )
        entry = EngineEntry(
            id="engines/local", builder=report.builder, builder_version=report.version, sm=report.sm,
            compute_capabilities=report.compute_capabilities, plugin_library=None, plugin_abi=None,
            plans={p.entry: p.path for p in report.plans}, profile=profile, seconds=seconds,
        )  # fmt: skip
        executor = TensorrtExecutor(
            drafter.config, entry, plans, tables["embed_tokens.weight"], tables["lm_head.weight"]
        )
        cases = [compare(drafter, executor, batch, rows, seed) for seed, (batch, rows) in enumerate(CASES)]
    result = {
        "what": f"plans from the {arguments.graphs} graphs, executed",
        "builder": f"{report.builder} {report.version}",
        "device": f"{torch.cuda.get_device_name()}, compute capability {torch.cuda.get_device_capability()}",
        "drafter": str(arguments.drafter),
        VARIABLE: os.environ.get(VARIABLE),
        "build_seconds": round(seconds, 2),
        "warnings": list(report.warnings),
        "cases": cases,
    }
    print(json.dumps(result, indent=1))
    arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
