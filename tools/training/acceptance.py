"""Acceptance length at temperature 0, computed from text the target already wrote.

Greedy speculative decoding commits exactly the target's own greedy text. So one teacher-forced pass gives every hidden state a real
decode would see, every position is drafted from in one batch, and the decode is replayed by hopping along the accepted prefixes.

tau counts committed tokens per verification call of the target, the bonus token included. The call that reads the prompt and yields
the first anchor is not counted, nor is its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.training.blocks import cut_blocks
from tools.training.data import Batch, Corpus, gather
from tools.training.drafter import TrainDrafter, block_bias
from tools.training.objective import head_product
from tools.training.target import Target

DRAFT_ROWS = 1024  # blocks whose [slots, V] logits are held at once


@dataclass(frozen=True)
class Replay:
    """One decoded sequence: committed tokens and verification calls, and per slot how often it was reached and kept."""

    committed: int
    calls: int
    kept: tuple[int, ...]  # [B-1] calls whose slot i was accepted


def draft_tokens(drafter: TrainDrafter, hidden: Tensor, before: Tensor, anchors: Tensor, head: Tensor, refine: bool) -> Tensor:
    """Greedy draft of R blocks: ``hidden`` and ``before`` [R, B, d], ``anchors`` [R] -> [R, B-1] tokens."""
    count = drafter.shape.top_k if refine else 1
    slots = hidden.shape[1] - 1
    logits = head_product(hidden[:, 1:].flatten(0, 1), head)
    candidates = logits.topk(count, -1).indices.view(-1, slots, count)
    if not refine:
        return candidates[..., 0]
    predecessors = torch.cat((anchors[:, None, None].expand(-1, 1, count), candidates[:, :-1]), dim=1)
    rows = before[:, 1:, None].expand(-1, -1, count, -1)
    refined = drafter.refine(rows, predecessors).float()  # [R, B-1, K, d]
    scores = torch.einsum("nskd,nsjd->nskj", refined, F.embedding(candidates, head).float())
    chosen, index = [], torch.zeros(len(anchors), dtype=torch.int64, device=anchors.device)
    for slot in range(slots):
        index = scores[torch.arange(len(anchors)), slot, index].argmax(-1)
        chosen.append(candidates[torch.arange(len(anchors)), slot, index])
    return torch.stack(chosen, dim=1)


@torch.no_grad()
def matched_prefixes(drafter: TrainDrafter, target: Target, batch: Batch, refine: bool) -> list[list[int]]:
    """For every sequence and every answer token as anchor: how many drafted tokens agree with the text that follows."""
    size, results = drafter.shape.block_size, []
    tapped, _ = target.forward(batch.ids, drafter.shape.taps)
    spans = (batch.lengths - batch.prompts).tolist()  # answer tokens
    widest = max(max(spans), 1)
    anchors = batch.prompts[:, None] + torch.arange(widest, device=batch.ids.device)
    anchors = torch.minimum(anchors, batch.lengths[:, None] - 1)
    blocks = cut_blocks(batch, anchors, size)
    inputs = torch.full_like(blocks.ids, drafter.shape.mask_token_id)
    inputs[..., 0] = blocks.ids[..., 0]
    bias = block_bias(anchors, batch.ids.shape[1], widest, size, drafter.shape.causal)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
        output = drafter(target.embed[inputs], tapped, blocks.ids, blocks.positions, bias)
        rows = zip(
            output.hidden.flatten(0, 1).split(DRAFT_ROWS),
            output.pre_injection.flatten(0, 1).split(DRAFT_ROWS),
            blocks.ids[..., 0].flatten().split(DRAFT_ROWS),
            strict=True,
        )
        parts = [draft_tokens(drafter, hidden, before, anchor, target.head, refine) for hidden, before, anchor in rows]
    drafted = torch.cat(parts).view(*blocks.ids.shape[:2], size - 1)
    agree = (drafted == blocks.ids[..., 1:]) & blocks.valid[..., 1:]
    lengths = agree.int().cumprod(-1).sum(-1).tolist()
    for row, span in enumerate(spans):
        results.append(lengths[row][:span])
    return results


def replay(matches: Sequence[int], slots: int) -> Replay:
    """Hop along one answer: from anchor a the call commits ``matches[a]`` drafted tokens and one more, which is the next anchor.

    ``matches`` has one entry per answer token; the last token has nothing after it, so the hop ends there.
    """
    last, position, calls, kept = len(matches) - 1, 0, 0, [0] * slots
    while position < last:
        accepted = matches[position]
        calls += 1
        for slot in range(accepted):
            kept[slot] += 1
        position = min(position + accepted + 1, last)
    return Replay(last, calls, tuple(kept)) if last > 0 else Replay(0, 0, tuple(kept))


def measure(
    drafter: TrainDrafter, target: Target, corpus: Corpus, refine: bool = True, inject: bool = True, size: int = 8
) -> list[Replay]:
    """Replay every sequence of ``corpus`` (target's greedy text), in order. ``inject`` off skips the injection of a trained drafter."""
    shape, results = drafter.shape, {}
    drafter.shape = shape if inject else type(shape)(**{**vars(shape), "inject": False})
    order = corpus.lengths.argsort().tolist()
    try:
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            found = matched_prefixes(drafter, target, gather(corpus, rows, target.device), refine)
            results.update({row: replay(m, shape.block_size - 1) for row, m in zip(rows, found, strict=True)})
    finally:
        drafter.shape = shape
    return [results[i] for i in range(len(order))]


def summarise(replays: Sequence[Replay]) -> dict[str, float | int | list[float]]:
    """tau (committed tokens over calls, summed over sequences), calls and the share of calls that kept each slot."""
    calls, committed = sum(r.calls for r in replays), sum(r.committed for r in replays)
    kept = [sum(column) for column in zip(*(r.kept for r in replays), strict=True)]
    return {
        "sequences": len(replays),
        "tokens": committed,
        "calls": calls,
        "tau": round(committed / max(calls, 1), 4),
        "kept_per_slot": [round(k / max(calls, 1), 4) for k in kept],
    }
