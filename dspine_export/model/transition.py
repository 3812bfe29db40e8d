"""Predecessor-conditioned decoding: candidates, the transition cache that scores their pairs, and the walk through the lattice."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dspine_export.model.injection import write
from dspine_export.model.norm import at_least_float32

LOGIT_CHUNK_ROWS = 16384
MIN_TEMPERATURE = 1e-30  # a float32 logit divided by less overflows


def unary_logits(hidden: Tensor, lm_head: Tensor) -> Tensor:
    """W h in at least float32: products of half-precision values are exact there, so no tie is created by rounding.

    hidden [N, T, d], lm_head [V, d] -> [N, T, V]. The head is widened in chunks of rows, never as a whole.
    """
    if torch.compiler.is_exporting() or lm_head.dtype in (torch.float32, torch.float64):
        return at_least_float32(F.linear(hidden, lm_head))
    wide = at_least_float32(hidden)
    return torch.cat([F.linear(wide, at_least_float32(rows)) for rows in lm_head.split(LOGIT_CHUNK_ROWS)], dim=-1)


def select_candidates(logits: Tensor, count: int, *, settle_ties: bool = True) -> Tensor:
    """Ids of the `count` largest logits, descending, ties to the lower id. [N, T, V] -> int64 [N, T, count]

    torch.topk leaves ties open, so they are settled here; ONNX TopK defines them this way, so an export needs the call alone.
    Looking for a tie across the boundary reads the device: without `settle_ties` such a tie stays as topk left it, and the call can
    be captured in a CUDA graph.
    """
    values, ids = torch.topk(logits, count, dim=-1)
    if torch.compiler.is_exporting():
        return ids
    boundary = values[..., -1:]
    if settle_ties and bool(((logits >= boundary).sum(-1) != count).any()):  # more rows qualify than fit
        return logits.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    by_id, order = ids.sort(dim=-1)
    rank = values.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
    return by_id.gather(-1, rank)


def predecessor_ids(anchor_ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """Possible predecessors of every slot: the anchor (repeated) for slot 1, else the previous slot's candidates. [N, T, K]"""
    first = anchor_ids[:, None, None].expand(-1, 1, candidate_ids.shape[-1])
    return torch.cat((first, candidate_ids[:, :-1]), dim=1)


def score_pairs(
    pre_injection: Tensor,
    receiver_gate: Tensor,
    message: Tensor,
    predecessor_gate: Tensor,
    candidate_ids: Tensor,
    write_weight: Tensor,
    norm_weight: Tensor,
    lm_head: Tensor,
    eps: float,
) -> Tensor:
    """S[i, k, j]: the last write redone with predecessor k, normed, against the head row of candidate j.

    Args:
        pre_injection: [N, T, d] last layer before its injection, slots 1 .. B-1 (T = B-1).
        receiver_gate: [N, T, m] G_r phi_L(pre) + b.
        message, predecessor_gate: [N, T, K, m] M p and G_p p of every predecessor.
        candidate_ids: int64 [N, T, K].

    Returns:
        float32 (float64 for float64 inputs) [N, T, K, K].
    """
    gated = torch.sigmoid(receiver_gate.unsqueeze(2) + predecessor_gate) * message  # [N, T, K, m]
    receiver = pre_injection.unsqueeze(2)  # [N, T, 1, d]
    refined = receiver + write(receiver, gated, write_weight)  # [N, T, K, d]
    refined = F.rms_norm(at_least_float32(refined), (refined.shape[-1],), at_least_float32(norm_weight), eps)
    rows = at_least_float32(F.embedding(candidate_ids, lm_head))  # [N, T, K, d]
    return refined @ rows.transpose(-1, -2)


def walk(scores: Tensor, candidate_ids: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Reference of the operator ``dspine::lattice_walk``.

    Args:
        scores: float32 [N, T, K, K].
        candidate_ids: int64 [N, T, K].
        temperature: float32 [N]; 0 walks greedily (lowest index on ties), > 0 samples.
        uniforms: float32 [N, T] in [0, 1).

    Returns:
        tokens int64 [N, T] and q float32 [N, T, K], the very rows sampled from (one-hot where greedy).
    """
    sampled = (temperature > 0).unsqueeze(-1)  # [N, 1]
    divisor = torch.where(sampled, temperature.unsqueeze(-1), 1.0)
    index = torch.arange(scores.shape[-1], device=scores.device)
    tokens, rows = [], []
    row = scores[:, 0, 0]  # slot 1 has one predecessor, every row of its table is the same
    for slot in range(scores.shape[1]):
        greedy = row.argmax(dim=-1, keepdim=True)  # [N, 1]
        soft = torch.softmax(row / divisor, dim=-1)
        drawn = (
            (soft.cumsum(dim=-1) <= uniforms[:, slot : slot + 1])
            .sum(dim=-1, keepdim=True)
            .clamp_max(index.shape[0] - 1)
        )
        choice = torch.where(sampled, drawn, greedy)
        tokens.append(candidate_ids[:, slot].gather(-1, choice))
        rows.append(torch.where(sampled, soft, (index == greedy).to(soft.dtype)))
        if slot + 1 < scores.shape[1]:
            row = scores[:, slot + 1].gather(1, choice.unsqueeze(-1).expand(-1, 1, scores.shape[-1])).squeeze(1)
    return torch.cat(tokens, dim=-1), torch.stack(rows, dim=1)
