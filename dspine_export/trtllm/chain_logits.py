"""The lattice as the logits that TensorRT-LLM's samplers and verifier expect: one row over the vocabulary per drafted token."""

from __future__ import annotations

import torch
from torch import Tensor


def chain_logits(scores: Tensor, candidate_ids: Tensor, chosen: Tensor, vocab_size: int) -> Tensor:
    """Rows of the transition cache along its greedy walk, spread over the vocabulary; minus infinity outside the candidates.

    A greedy sampler picks exactly the walk's tokens. A sampler at temperature T draws slot i from softmax(S[i, greedy predecessor] / T)
    and the rejection test uses that same row: the output keeps the target's distribution, only acceptance differs from a sampled walk.

    Args:
        scores: float32 [G, T, K, K]. candidate_ids: int64 [G, T, K].
        chosen: int64 [G, T], the greedy walk's candidate in every slot.

    Returns:
        float32 [G, T, V].
    """
    batch, slots, count = candidate_ids.shape
    previous = torch.cat((torch.zeros_like(chosen[:, :1]), chosen[:, :-1]), dim=1)
    rows = scores.gather(2, previous[..., None, None].expand(-1, -1, 1, count)).squeeze(2)  # [G, T, K]
    # The walk takes the lowest candidate index on ties, a sampler over the vocabulary the lowest id: lift the walk's choice by one step.
    best = rows.gather(-1, chosen.unsqueeze(-1))
    rows = rows.scatter(-1, chosen.unsqueeze(-1), torch.nextafter(best, torch.full_like(best, torch.inf)))
    return rows.new_full((batch, slots, vocab_size), -torch.inf).scatter(-1, candidate_ids, rows)
