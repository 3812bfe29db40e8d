"""The lab's diagnosis at temperature 1: how much of every slot's proposal the target would keep, given that the slots before were right.

The target writes text at temperature 1, the same for every arm; blocks are cut from it and drafted with the true predecessors. A slot's
expected acceptance is sum_v min(p, q). q lives on the whole vocabulary for arms that draft slot by slot or with a Markov head, on the K
unary candidates for arms with a lattice: there p's mass on the candidates is the bound. In the loop anchors are no random positions, they
stand where a proposal was rejected, so the loop's acceptance is lower than this for every arm.

Symbols: R rows of predicting slots, S = B - 1 slots, V vocabulary, K candidates.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

from tools.training.arms import Starts
from tools.training.blocks import Blocks, cut_blocks, rows_before, sample_anchors
from tools.training.data import Batch, Corpus, gather, pack
from tools.training.drafter import DraftPass, TrainDrafter, block_bias
from tools.training.generate import generate
from tools.training.lab_files import SLOTS, load_arm, write_json
from tools.training.lab_measure import load_prompt_sets, measuring_dtype, spread, trained_arms
from tools.training.objective import candidate_scores, head_product, top_candidates
from tools.training.target import Target, load_target

PROMPTS, LENGTH, ANCHORS, SEQUENCES = 200, 96, 12, 20
CANDIDATES = (16, 64)


def slots(a: argparse.Namespace) -> None:
    """Write ``slots.json`` of every trained arm that has none."""
    device, folders = torch.device(a.device), [folder for folder in trained_arms(a) if not (folder / SLOTS).is_file()]
    if not folders:
        print("nothing left to look at", flush=True)
        return
    starts = Starts(load_target(a.target, device, measuring_dtype(device)), a.rank)
    prompts = spread(*load_prompt_sets(a), PROMPTS)
    torch.manual_seed(13)
    text = pack(prompts, generate(starts.target, prompts, [1.0] * len(prompts), min(LENGTH, a.max_new_tokens)))
    for folder in folders:
        arm, drafter = load_arm(folder, starts)
        report = expected_acceptance(drafter, arm.drafts_by, starts.target, text)
        print(folder.name, arm.title, report, flush=True)
        write_json(folder / SLOTS, report)


@torch.no_grad()
def expected_acceptance(drafter: TrainDrafter, drafts_by: str, target: Target, text: Corpus) -> dict[str, Any]:
    """Means over all blocks, a list [S] per kind of proposal."""
    sums: dict[str, Tensor] = {}
    counted = torch.zeros(drafter.shape.block_size - 1, device=target.device)
    generator = torch.Generator().manual_seed(14)
    for rows in torch.arange(len(text)).split(SEQUENCES):
        batch = gather(text, rows.tolist(), torch.device("cpu"))
        anchors = sample_anchors(batch, ANCHORS, generator).to(target.device)
        batch = Batch(*(t.to(target.device) for t in (batch.ids, batch.prompts, batch.lengths)))
        blocks = cut_blocks(batch, anchors, drafter.shape.block_size)
        valid = blocks.valid[..., 1:].flatten(0, 1).float()
        counted += valid.sum(0)
        for name, value in _acceptance(drafter, drafts_by, target, batch, blocks).items():
            kept = (value.view_as(valid) * valid).sum(0)
            sums[name] = sums[name] + kept if name in sums else kept
    means = {name: [round(x, 4) for x in (value / counted).tolist()] for name, value in sums.items()}
    return {"blocks": int(counted[0]), "drafts_by": drafts_by, **means}


def _acceptance(
    drafter: TrainDrafter, drafts_by: str, target: Target, batch: Batch, blocks: Blocks
) -> dict[str, Tensor]:  # fmt: skip
    shape, previous = drafter.shape, blocks.ids[..., :-1].flatten()
    tapped, final = target.forward(batch.ids, shape.taps)
    rows = torch.full_like(blocks.ids, shape.mask_token_id)
    rows[..., 0] = blocks.ids[..., 0]
    bias = block_bias(blocks.anchors, batch.ids.shape[1], blocks.anchors.shape[1], shape.block_size, shape.causal)
    p = head_product(rows_before(final, blocks.positions).flatten(0, -2), target.head).softmax(-1)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        output = drafter(target.embed[rows], tapped, blocks.ids, blocks.positions, bias)
        logits = head_product(output.hidden[..., 1:, :].flatten(0, -2), target.head)
        found = {"slot by slot": torch.minimum(p, logits.softmax(-1)).sum(-1)}
        if drafter.pair is not None and drafts_by == "markov":
            extra = head_product(drafter.pair.query(logits, previous), drafter.pair.following.to(target.dtype))
            found["markov"] = torch.minimum(p, (logits + extra).softmax(-1)).sum(-1)
        if drafts_by == "lattice":
            found |= _on_candidates(drafter, output, p, logits, previous, target.head)
    return found


def _on_candidates(
    drafter: TrainDrafter, output: DraftPass, p: Tensor, logits: Tensor, previous: Tensor, head: Tensor
) -> dict[str, Tensor]:  # fmt: skip
    found: dict[str, Tensor] = {}
    for count in CANDIDATES:
        ids = top_candidates(logits, count)
        own, q = p.gather(-1, ids), candidate_scores(drafter, output, ids, previous, head).softmax(-1)
        found |= {f"lattice, K={count}": torch.minimum(own, q).sum(-1), f"mass of K={count}": own.sum(-1)}
    return found
