"""Let the target answer the training prompts and keep what is worth learning from.

    python -m tools.write_corpus --target TARGET --prompts PROMPTS.jsonl --out corpus.pt        (or corpus.xz, compressed)

Each prompt is answered once per entry of ``--temperatures``. An answer is cut where it starts to repeat itself, and dropped when less
than ``--shortest`` tokens remain.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from tools.training.data import Corpus, cut_loops, pack
from tools.training.generate import generate
from tools.training.prompts import LONGEST_PROMPT, encode_prompts, load_tokenizer, read_prompts
from tools.training.target import load_target


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line of the corpus writer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--prompts", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    add("--max-new-tokens", type=int, default=256)
    add("--shortest", type=int, default=16)
    add("--batch", type=int, default=2048)
    add("--limit", type=int, help="use only the first prompts")
    add("--seed", type=int, default=1)
    add("--mask-token-id", type=int, default=16, help="answers with this token are counted and dropped")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def write_corpus(a: argparse.Namespace) -> Corpus:
    """Generate, filter and save; prints one JSON line of statistics."""
    device = torch.device(a.device)
    torch.manual_seed(a.seed)
    tokenizer = load_tokenizer(a.target)
    target = load_target(a.target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    encoded = encode_prompts(tokenizer, read_prompts(a.prompts)[: a.limit])
    prompts = [ids for ids in encoded if len(ids) <= LONGEST_PROMPT]
    repeated = [ids for ids in prompts for _ in a.temperatures]
    temperatures = [t for _ in prompts for t in a.temperatures]
    started = time.perf_counter()
    answers = generate(target, repeated, temperatures, a.max_new_tokens, a.batch, _report)
    seconds = time.perf_counter() - started
    kept, looped = cut_loops(answers)
    wrote_mask = sum(a.mask_token_id in answer for answer in answers)
    kept = [[] if a.mask_token_id in k else k for k in kept]
    pairs = list({(tuple(p), tuple(k)) for p, k in zip(repeated, kept, strict=True) if len(k) >= a.shortest})
    pairs.sort()
    corpus = pack([p for p, _ in pairs], [k for _, k in pairs])
    corpus.save(a.out)
    tokens = sum(map(len, answers))
    statistics = {
        "prompts": len(prompts), "prompts_skipped": len(encoded) - len(prompts), "answers": len(answers), "answer_tokens": tokens,
        "loops_cut": looped, "sequences": len(corpus), "sequence_tokens": len(corpus.tokens), "seconds": round(seconds, 1),
        "answers_with_mask_token": wrote_mask,
    }  # fmt: skip
    print(json.dumps(statistics), flush=True)
    a.out.with_suffix(".json").write_text(json.dumps(statistics, indent=1) + "\n")
    for prompt, answer in pairs[:: max(len(pairs) // 3, 1)][:3]:
        print(repr(tokenizer.decode([*prompt[-40:], *answer])[:400]), flush=True)
    return corpus


def _report(done: int, total: int) -> None:
    print(f"answered {done} of {total}", flush=True)


if __name__ == "__main__":
    write_corpus(parse_arguments())
