"""Acceptance length of a trained drafter at temperature 0 on prompt files, with injection and refinement on and off.

    python -m tools.measure_acceptance --target TARGET --drafter DRAFTER --prompts tests/data/prompts/*.jsonl --out acceptance.json

Every turn of a conversation is answered by the target greedily and scored (``tools/training/acceptance.py`` says how). "no_loops"
leaves out the answers in which the target starts to repeat itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tools.training.acceptance import measure, summarise
from tools.training.checkpoint import load_drafter
from tools.training.data import Corpus, cut_loops, pack
from tools.training.drafter import TrainDrafter
from tools.training.generate import generate
from tools.training.prompts import encode_chats, load_tokenizer, read_prompts
from tools.training.target import Target, load_target

LONGEST_CONVERSATION = 1400  # tokens; a longer one is left out and counted
VARIANTS = {
    "full": {"refine": True, "inject": True},
    "without_refinement": {"refine": False, "inject": True},
    "without_injection_and_refinement": {"refine": False, "inject": False},
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--drafter", type=Path, nargs="+", required=True, help="one or more checkpoints, measured on the same texts")
    add("--prompts", type=Path, nargs="+", required=True)
    add("--out", type=Path, required=True)
    add("--max-new-tokens", type=int, default=256)
    add("--limit", type=int, help="use only the first prompts of each file")
    add("--batch", type=int, default=1024)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def answer_prompts(
    target: Target, tokenizer: Any, files: list[Path], a: argparse.Namespace
) -> tuple[Corpus, list[str], list[bool]]:
    """The target's greedy answer to every turn, with the name of its prompt file and whether the answer repeats itself."""
    chats = [([turn], p["turns"], path.stem) for path in files for p in read_prompts(path)[: a.limit] for turn in p["turns"][:1]]
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    names: list[str] = []
    while chats:
        encoded = encode_chats(tokenizer, [history for history, _, _ in chats])
        fits = [i for i, ids in enumerate(encoded) if len(ids) <= LONGEST_CONVERSATION]
        written = generate(target, [encoded[i] for i in fits], [0.0] * len(fits), a.max_new_tokens, a.batch)
        following = []
        for i, answer in zip(fits, written, strict=True):
            history, turns, name = chats[i]
            prompts.append(encoded[i])
            answers.append(answer)
            names.append(name)
            done = (len(history) + 1) // 2
            if done < len(turns):
                text = tokenizer.decode(answer, skip_special_tokens=True)
                following.append(([*history, text, turns[done]], turns, name))
        chats = following
    kept, _ = cut_loops(answers)
    looped = [len(k) < len(answer) for k, answer in zip(kept, answers, strict=True)]
    return pack(prompts, answers), names, looped


def tabulate(
    drafter: TrainDrafter, target: Target, corpus: Corpus, names: list[str], looped: list[bool]
) -> dict[str, dict[str, Any]]:
    """{variant: {set: {"all": summary, "no_loops": summary}}}; the set "all" pools every prompt file."""
    table: dict[str, dict[str, Any]] = {}
    for variant, switches in VARIANTS.items():
        if not drafter.shape.inject and variant != "without_injection_and_refinement":
            continue
        replays = measure(drafter, target, corpus, **switches)
        table[variant] = {}
        for name in [*dict.fromkeys(names), "all"]:
            rows = [i for i, own in enumerate(names) if name in (own, "all")]
            table[variant][name] = {
                "all": summarise([replays[i] for i in rows]),
                "no_loops": summarise([replays[i] for i in rows if not looped[i]]),
            }
    return table


def main(argv: list[str] | None = None) -> None:
    """Measure and write one JSON file; prints tau per variant and set."""
    a = parse_arguments(argv)
    device = torch.device(a.device)
    target = load_target(a.target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    corpus, names, looped = answer_prompts(target, load_tokenizer(a.target), a.prompts, a)
    results = {}
    for path in a.drafter:
        drafter = load_drafter(path, target)
        results[path.name] = tabulate(drafter, target, corpus, names, looped)
        for variant, sets in results[path.name].items():
            taus = {name: (s["all"]["tau"], s["no_loops"]["tau"]) for name, s in sets.items()}
            print(path.name, variant, "tau (all, without loops):", json.dumps(taus), flush=True)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
