"""What a proposal on K candidates costs at temperature 1: expected acceptance of slot 1, sum_v min(p, q), by number of candidates.

    python -m tools.measure_truncation --target TARGET --drafter DRAFTER --prompts tests/data/prompts/*.jsonl --out truncation.json

The target writes text at temperature 1; every position of it is an anchor. At slot 1 a DSpine drafter's conditioned scores are its unary
logits, since the predecessor is the anchor itself, so q over K candidates is the softmax of their logits.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from tools.training.blocks import cut_blocks
from tools.training.checkpoint import load_drafter
from tools.training.data import Batch, gather, pack
from tools.training.drafter import TrainDrafter, block_bias
from tools.training.generate import generate
from tools.training.objective import head_product
from tools.training.prompts import encode_prompts, load_tokenizer, read_prompts
from tools.training.target import Target, load_target

CANDIDATES = (4, 8, 16, 32, 64, 128, 256)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; the defaults run in some minutes on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--drafter", type=Path, required=True)
    add("--prompts", type=Path, nargs="+", required=True)
    add("--out", type=Path, required=True)
    add("--per-set", type=int, default=8)
    add("--longest", type=int, default=160, help="tokens of a prompt; longer ones are passed over")
    add("--max-new-tokens", type=int, default=48)
    add("--seed", type=int, default=5)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


@torch.no_grad()
def slot_one(drafter: TrainDrafter, target: Target, batch: Batch) -> tuple[Tensor, Tensor]:
    """(p, unary logits) [anchors, V] of slot 1 after every answer token of the batch's only sequence."""
    tapped, final = target.forward(batch.ids, drafter.shape.taps)
    anchors = torch.arange(int(batch.prompts[0]), int(batch.lengths[0]), device=batch.ids.device)[None]
    blocks = cut_blocks(batch, anchors, drafter.shape.block_size)
    rows = torch.full_like(blocks.ids, drafter.shape.mask_token_id)
    rows[..., 0] = blocks.ids[..., 0]
    bias = block_bias(anchors, batch.ids.shape[1], anchors.shape[1], drafter.shape.block_size, drafter.shape.causal)
    output = drafter(target.embed[rows].float(), tapped, blocks.ids, blocks.positions, bias)
    return head_product(final[0, anchors[0]], target.head).softmax(-1), head_product(output.hidden[0, :, 1], target.head)


def acceptances(p: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """Per anchor: acceptance with q over the whole vocabulary; with q over K candidates, and p's mass on them, which bounds it."""
    found = {"whole vocabulary": torch.minimum(p, logits.softmax(-1)).sum(-1)}
    for count in CANDIDATES:
        ids = logits.topk(count, -1).indices
        own = p.gather(-1, ids)
        found[f"K={count}"] = torch.minimum(own, logits.gather(-1, ids).softmax(-1)).sum(-1)
        found[f"mass of K={count}"] = own.sum(-1)
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure in float32, print and write."""
    a = parse_arguments(argv)
    torch.manual_seed(a.seed)
    target = load_target(a.target, torch.device(a.device), torch.float32)
    drafter, tokenizer = load_drafter(a.drafter, target), load_tokenizer(a.target)
    prompts: list[list[int]] = []
    for path in sorted(a.prompts):
        encoded = encode_prompts(tokenizer, read_prompts(path)[: 5 * a.per_set])
        prompts += [ids for ids in encoded if len(ids) <= a.longest][: a.per_set]
    answers = generate(target, prompts, [1.0] * len(prompts), a.max_new_tokens, batch=20)
    corpus, parts = pack(prompts, answers), []
    for row in range(len(corpus)):
        parts.append(acceptances(*slot_one(drafter, target, gather(corpus, [row], target.device))))
    means = {name: round(float(torch.cat([part[name] for part in parts]).mean()), 4) for name in parts[0]}
    sizes = {"answers": len(answers), "positions": sum(map(len, answers))}
    result = {"what": "expected acceptance of slot 1 at temperature 1", **sizes, **means}
    print(json.dumps(result), flush=True)
    a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
