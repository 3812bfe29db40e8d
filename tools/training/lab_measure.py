"""The lab's measuring commands: acceptance of every trained arm on the same prompts, and exactness of the loop.

Settings: temperature 0; temperature 1 with tokens drawn from the drafter's q ("t1", the headline); temperature 1 with the drafter's best
choices ("t1_argmax", q one-hot). An arm that drafts over the lattice can be measured with other numbers of candidates too, from the same
weights ("t1_k64"). Every arm starts a setting from the same random state, and every setting is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tools.training.arms import Starts
from tools.training.exactness import greedy_exactness, sampled_exactness
from tools.training.lab_files import ARM_FILE, EXACT, MEASURED, load_arm, read_json, write_json
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


def trained_arms(a: argparse.Namespace) -> list[Path]:
    """Folders of the trained arms asked for, by letter and by seed."""
    folders = sorted(path.parent for path in a.out.glob(f"*/{ARM_FILE}"))
    wanted = [folder for folder in folders if a.only is None or folder.name[0] in a.only]
    return [folder for folder in wanted if a.seeds is None or int(folder.name[1:]) in a.seeds]


def settings_of(arm: dict[str, Any], candidates: Sequence[int]) -> dict[str, tuple[float, bool, int]]:
    """What to measure of an arm, by name: temperature, whether to draw from q, candidates per slot."""
    own = int(arm["shape"]["top_k"])
    settings = {name: (*values, own) for name, values in SETTINGS.items()}
    others = [k for k in candidates if k != own] if arm["drafts_by"] == "lattice" else []
    return settings | {f"{name}_k{k}": (*SETTINGS[name], k) for k in others for name in ("t1", "t0")}


def measuring_dtype(device: torch.device) -> torch.dtype:
    """What drafts are measured in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def measure(a: argparse.Namespace) -> None:
    """Write ``measured.json`` of every trained arm, or what it lacks."""
    device = torch.device(a.device)
    left = {folder: _missing(folder, a.candidates) for folder in trained_arms(a)}
    if not any(left.values()):
        print("nothing left to measure", flush=True)
        return
    starts = Starts(load_target(a.target, device, measuring_dtype(device)), a.rank)
    names, prompts = load_prompt_sets(a)
    for folder, settings in left.items():
        arm, drafter = load_arm(folder, starts)
        result: dict[str, Any] = {"sets": names, "max_new_tokens": a.max_new_tokens, "block_size": drafter.shape.block_size}
        result |= {"prompts": len(prompts), **_known(folder)}
        for setting, (temperature, sample, candidates) in settings.items():
            began = time.monotonic()
            drafter.shape = replace(drafter.shape, top_k=candidates)
            torch.manual_seed(11)
            decodes: list[Decode] = []
            for first in range(0, len(prompts), a.rows):
                part = prompts[first : first + a.rows]
                decodes += run_loop(starts.target, drafter, arm.drafts_by, part, temperature, sample, a.max_new_tokens)
            result[setting] = _entry(names, decodes, time.monotonic() - began)
            print(folder.name, arm.title, setting, result[setting]["summary"], flush=True)
            write_json(folder / MEASURED, result)


def _known(folder: Path) -> dict[str, Any]:
    return read_json(folder / MEASURED) if (folder / MEASURED).is_file() else {}


def _missing(folder: Path, candidates: Sequence[int]) -> dict[str, tuple[float, bool, int]]:
    wanted, known = settings_of(read_json(folder / ARM_FILE), candidates), _known(folder)
    return {name: values for name, values in wanted.items() if name not in known}


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
    device, folders = torch.device(a.device), [folder for folder in trained_arms(a) if not (folder / EXACT).is_file()]
    if not folders:
        print("nothing left to check", flush=True)
        return
    starts = Starts(load_target(a.target, device, torch.float32), a.rank)
    names, prompts = load_prompt_sets(a)
    few = spread(names, prompts, GREEDY_PROMPTS)
    for folder in folders:
        arm, drafter = load_arm(folder, starts)
        torch.manual_seed(12)
        report: dict[str, Any] = {"greedy": greedy_exactness(starts.target, drafter, arm.drafts_by, few, a.max_new_tokens)}
        for name, sample in (("sampled", True), ("argmax", False)):
            options = {"sample": sample, "draws": a.draws}
            report[name] = sampled_exactness(starts.target, drafter, arm.drafts_by, spread(names, prompts, PREFIXES), **options)
        print(folder.name, report, flush=True)
        write_json(folder / EXACT, report)


def spread(names: Sequence[str], prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """The first prompts of every set in turn, ``count`` in all."""
    sets = {name: [p for p, n in zip(prompts, names, strict=True) if n == name] for name in dict.fromkeys(names)}
    ranked = [(place, index, prompt) for index, own in enumerate(sets.values()) for place, prompt in enumerate(own)]
    return [prompt for _, _, prompt in sorted(ranked, key=lambda r: r[:2])[:count]]
