"""From a drafter's hidden states to a proposal: tokens, and the distribution q each was drawn from.

unary       every slot on its own, over the whole vocabulary
markov      slot by slot, the head's bias of the token chosen before added to the unary logits
lattice     K candidates per slot, scores of all K x K neighbours, a walk from the anchor (DSpine's refinement, DFlash2's selector)

At temperature 0, or with ``sample`` off, a proposal is the best choice of every slot and q is one-hot; otherwise slots are drawn from q.

Symbols: N sequences, S = B - 1 predicting slots, V vocabulary, K candidates, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.training.drafter import TrainDrafter
from tools.training.objective import head_product, top_candidates


@dataclass(frozen=True)
class Proposal:
    """``rows(n, slots)`` gives the dense q [len(n), V] of sequences n at the given slots."""

    tokens: Tensor  # int64 [N, S]
    chosen_q: Tensor  # fp32 [N, S] probability with which each token was drawn
    candidates: Tensor  # int64 [N, S, K] unary top K: coverage and the oracle path are read off these
    rows: Callable[[Tensor, Tensor], Tensor]


def draw(q: Tensor, sample: bool) -> Tensor:
    """One index per row of ``q`` [.., V]: the largest, or a sample (smallest of exponential races)."""
    return (q / torch.empty_like(q).exponential_()).argmax(-1) if sample else q.argmax(-1)


def _one_hot_rows(tokens: Tensor, size: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda n, slots: F.one_hot(tokens[n, slots], size).float()


def propose(
    drafter: TrainDrafter, drafts_by: str, hidden: Tensor, before: Tensor, anchors: Tensor, head: Tensor, temperature: float, sample: bool
) -> Proposal:  # fmt: skip
    """A proposal for N blocks: ``hidden`` and ``before`` [N, B, d] as the drafter's pass left them, ``anchors`` int64 [N]."""
    sample = sample and temperature > 0
    count, slots = hidden.shape[0], hidden.shape[1] - 1
    logits = head_product(hidden[:, 1:].flatten(0, 1), head)
    candidates = top_candidates(logits, drafter.shape.top_k).view(count, slots, -1)
    heat = temperature if sample else 1.0
    if drafts_by == "unary":
        q = (logits / heat).softmax(-1).view(count, slots, -1)
        return _over_vocabulary(draw(q, sample), q, candidates, sample)
    if drafts_by == "markov":
        return _markov(drafter, logits.view(count, slots, -1), anchors, candidates, heat, sample)
    unary = logits.view(count, slots, -1).gather(-1, candidates)
    scores = lattice_scores(drafter, hidden, before, anchors, candidates, unary, head)
    return _walk((scores / heat).softmax(-1), candidates, head.shape[0], sample)


def _markov(
    drafter: TrainDrafter, logits: Tensor, anchors: Tensor, candidates: Tensor, heat: float, sample: bool
) -> Proposal:  # fmt: skip
    pair = drafter.pair
    assert pair is not None
    previous, tokens, rows = anchors, [], []
    table = pair.following.to(torch.bfloat16) if logits.is_cuda else pair.following
    for slot in range(logits.shape[1]):
        biased = logits[:, slot] + head_product(pair.query(logits, previous), table)
        q = (biased / heat).softmax(-1)
        previous = draw(q, sample)
        tokens.append(previous)
        rows.append(q)
    return _over_vocabulary(torch.stack(tokens, 1), torch.stack(rows, 1), candidates, sample)


def _over_vocabulary(tokens: Tensor, q: Tensor, candidates: Tensor, sample: bool) -> Proposal:
    if not sample:
        return Proposal(tokens, torch.ones_like(tokens, dtype=q.dtype), candidates, _one_hot_rows(tokens, q.shape[-1]))
    return Proposal(tokens, q.gather(-1, tokens[..., None])[..., 0], candidates, lambda n, slots: q[n, slots])


def lattice_scores(
    drafter: TrainDrafter, hidden: Tensor, before: Tensor, anchors: Tensor, candidates: Tensor, unary: Tensor, head: Tensor
) -> Tensor:
    """fp32 [N, S, K, K]: the score of every candidate (last) after every candidate of the slot before; slot 1 follows the anchor."""
    count = candidates.shape[-1]
    previous = torch.cat((anchors[:, None, None].expand(-1, 1, count), candidates[:, :-1]), dim=1)  # [N, S, K]
    if drafter.pair is None:
        rows = before[:, 1:, None].expand(-1, -1, count, -1)
        refined = drafter.refine(rows, previous).float()  # [N, S, K, d]
        with torch.autocast(refined.device.type, enabled=False):
            return torch.einsum("nskd,nsjd->nskj", refined, F.embedding(candidates, head).float())
    query = drafter.pair.query(hidden[:, 1:, None], previous).float()  # [N, S, K, r]
    with torch.autocast(query.device.type, enabled=False):
        return unary[:, :, None] + torch.einsum("nskr,nsjr->nskj", query, drafter.pair.following_rows(candidates).float())


def _walk(q: Tensor, candidates: Tensor, size: int, sample: bool) -> Proposal:
    """Walk the lattice ``q`` [N, S, K, K] from the anchor."""
    everyone = torch.arange(q.shape[0], device=q.device)
    index, chosen, rows = torch.zeros_like(everyone), [], []
    for slot in range(q.shape[1]):
        row = q[everyone, slot, index]
        index = draw(row, sample)
        rows.append(row)
        chosen.append(index)
    picked, walked = torch.stack(chosen, 1), torch.stack(rows, 1)  # [N, S], [N, S, K]
    tokens = candidates.gather(-1, picked[..., None])[..., 0]
    if not sample:
        return Proposal(tokens, torch.ones_like(tokens, dtype=q.dtype), candidates, _one_hot_rows(tokens, size))

    def dense(n: Tensor, slots: Tensor) -> Tensor:
        empty = torch.zeros(len(n), size, device=q.device)
        return empty.scatter_(1, candidates[n, slots], walked[n, slots])

    return Proposal(tokens, walked.gather(-1, picked[..., None])[..., 0], candidates, dense)
