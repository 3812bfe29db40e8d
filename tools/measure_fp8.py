"""What rounding a drafter to float8 costs in acceptance length: the runtime's own loop, greedy, by weight format.

    python -m tools.measure_fp8 --target TARGET --drafter DRAFTER --prompts tests/data/prompts/*.jsonl --out fp8.json

Acceptance length (tau) counts committed tokens per target call, the bonus token included. First turns only.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from dspine_export.runtime.generate import generate_batch
from dspine_export.runtime.generation import Settings
from dspine_export.runtime.load_target import open_target
from dspine_export.runtime.open_executor import open_executor
from dspine_export.runtime.prompts import encode_prompt, load_tokenizer
from dspine_export.runtime.statistics import AcceptanceStatistics
from dspine_export.runtime.target import TargetExecutor
from tools.training.prompts import read_prompts

ARMS = {"eager bfloat16": ("eager", "full"), "kernels bfloat16": ("torch", "full"), "kernels float8": ("torch", "fp8")}


def measure(target: TargetExecutor, executor: Any, prompts: list[list[int]], a: argparse.Namespace) -> dict[str, Any]:
    """Counters over all prompts, and seconds of the whole loop, the target's passes included."""
    total, started = AcceptanceStatistics(), time.monotonic()
    for start in range(0, len(prompts), a.batch):
        settings = Settings(a.max_new_tokens, eos_ids=target.eos_ids)
        for result in generate_batch(target, executor, prompts[start : start + a.batch], settings):
            total.add(result.statistics)
    return {"seconds": round(time.monotonic() - started, 1), **total.to_json()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--drafter", type=Path, required=True)
    add("--prompts", type=Path, nargs="+", required=True)
    add("--out", type=Path, required=True)
    add("--max-new-tokens", type=int, default=192)
    add("--limit", type=int, default=100, help="prompts of each file")
    add("--batch", type=int, default=128)
    add("--arms", nargs="+", choices=sorted(ARMS), default=["kernels bfloat16", "kernels float8"])
    a = parser.parse_args()
    config = json.loads((a.drafter / "config.json").read_text())
    target = open_target(a.target, config["dflash_config"]["target_layer_ids"], dtype="bfloat16", device="cuda")
    tokenizer = load_tokenizer(a.target)
    texts = [item["turns"][0] for path in a.prompts for item in read_prompts(path)[: a.limit]]
    prompts = [encode_prompt(tokenizer, text) for text in texts]
    result: dict[str, Any] = {
        "what": "acceptance length at temperature 0 by weight format, the runtime's own loop",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "prompts": len(prompts),
        "max_new_tokens": a.max_new_tokens,
        "arms": {},
    }
    for arm in a.arms:
        name, weights = ARMS[arm]
        executor = open_executor(name, a.drafter, target.embed_tokens, target.lm_head, weights=weights)
        measure(target, executor, prompts[:2], a)  # captures and compiles
        result["arms"][arm] = measure(target, executor, prompts, a)
        found = result["arms"][arm]
        print(f"{arm}: tau {found['acceptance_length']:.3f}, {found['seconds']} s", flush=True)
        a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
