"""The lab's measuring commands: acceptance of every trained arm on the same prompts, and exactness of the loop.

Settings: temperature 0; temperature 1 with tokens drawn from the drafter's q ("t1", the headline); temperature 1 with the drafter's best
choices ("t1_argmax", q one-hot). Every arm starts a setting from the same random state.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tools.training.arms import Starts
from tools.training.exactness import greedy_exactness, sampled_exactness
from tools.training.lab_files import ARM_FILE, EXACT, MEASURED, load_arm, write_json
from tools.training.measure_loop import Decode, distinct, looped, run_loop
from tools.training.prompts import LONGEST_PROMPT, encode_prompts, load_tokenizer, read_prompts
from tools.training.target import load_target

SETTINGS = {"t0": (0.0, False), "t1": (1.0, True), "t1_argmax": (1.0, False)}
GREEDY_PROMPTS, PREFIXES = 60, 50


def load_prompt_sets(a: argparse.Namespace) -> tuple[list[str], list[list[int]]]:
    """Set names and token ids of every prompt: the first turn of each; prompts of more than `LONGEST_PROMPT` tokens are left out."""
    tokenizer = load_tokenizer(a.target)
    names: list[str] = []
    prompts: list[list[int]] = []
    for path in sorted(a.prompts):
        encoded = encode_prompts(tokenizer, read_prompts(path)[: a.per_set])
        fits = [ids for ids in encoded if 1 < len(ids) <= LONGEST_PROMPT]
        names += [path.stem] * len(fits)
        prompts += fits
    return names, prompts


def trained_arms(a: argparse.Namespace, without: str) -> list[Path]:
    """Folders of trained arms that lack the file ``without``."""
    folders = sorted(path.parent for path in a.out.glob(f"*/{ARM_FILE}"))
    wanted = [folder for folder in folders if a.only is None or folder.name[0] in a.only]
    return [folder for folder in wanted if not (folder / without).is_file()]


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def measure(a: argparse.Namespace) -> None:
    """Write ``measured.json`` of every trained arm that has none."""
    device, folders = torch.device(a.device), trained_arms(a, MEASURED)
    if not folders:
        print("nothing left to measure", flush=True)
        return
    starts = Starts(load_target(a.target, device, _dtype(device)), a.rank)
    names, prompts = load_prompt_sets(a)
    for folder in folders:
        arm, drafter = load_arm(folder, starts)
        result: dict[str, Any] = {"sets": names, "max_new_tokens": a.max_new_tokens, "block_size": drafter.shape.block_size}
        for setting, (temperature, sample) in SETTINGS.items():
            began = time.monotonic()
            torch.manual_seed(11)
            decodes: list[Decode] = []
            for first in range(0, len(prompts), a.rows):
                part = prompts[first : first + a.rows]
                decodes += run_loop(starts.target, drafter, arm.drafts_by, part, temperature, sample, a.max_new_tokens)
            result[setting] = _entry(names, decodes, time.monotonic() - began)
            print(folder.name, arm.title, setting, result[setting]["summary"], flush=True)
        write_json(folder / MEASURED, {**result, "prompts": len(prompts)})


def _entry(names: Sequence[str], decodes: list[Decode], seconds: float) -> dict[str, Any]:
    answers = [d.answer for d in decodes]
    loops = looped(answers)
    taus = {}
    for name in dict.fromkeys(names):
        own = [d for d, n in zip(decodes, names, strict=True) if n == name]
        taus[name] = round(sum(d.committed for d in own) / max(sum(d.calls for d in own), 1), 3)
    summary = {"tau": round(sum(taus.values()) / len(taus), 3), **taus, "looped": sum(loops), "seconds": round(seconds, 1)}
    rows = [d.numbers(loop) for d, loop in zip(decodes, loops, strict=True)]
    return {"summary": summary, "distinct": distinct(answers), "answers": rows}


def exact(a: argparse.Namespace) -> None:
    """Write ``exact.json`` of every trained arm that has none; in float32, where a rounding error rarely decides a token."""
    device, folders = torch.device(a.device), trained_arms(a, EXACT)
    if not folders:
        print("nothing left to check", flush=True)
        return
    starts = Starts(load_target(a.target, device, torch.float32), a.rank)
    names, prompts = load_prompt_sets(a)
    few = _spread(names, prompts, GREEDY_PROMPTS)
    for folder in folders:
        arm, drafter = load_arm(folder, starts)
        torch.manual_seed(12)
        report: dict[str, Any] = {"greedy": greedy_exactness(starts.target, drafter, arm.drafts_by, few, a.max_new_tokens)}
        for name, sample in (("sampled", True), ("argmax", False)):
            options = {"sample": sample, "draws": a.draws}
            report[name] = sampled_exactness(starts.target, drafter, arm.drafts_by, _spread(names, prompts, PREFIXES), **options)
        print(folder.name, report, flush=True)
        write_json(folder / EXACT, report)


def _spread(names: Sequence[str], prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """The first prompts of every set in turn, ``count`` in all."""
    sets = {name: [p for p, n in zip(prompts, names, strict=True) if n == name] for name in dict.fromkeys(names)}
    ranked = [(place, index, prompt) for index, own in enumerate(sets.values()) for place, prompt in enumerate(own)]
    return [prompt for _, _, prompt in sorted(ranked, key=lambda r: r[:2])[:count]]
