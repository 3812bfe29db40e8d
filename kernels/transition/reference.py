"""Naive references of the transition kernels: the oracles of their tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def transition_scores_reference(
    pre: Tensor, receiver_gate: Tensor, anchor_ids: Tensor, candidate_ids: Tensor, token_table: Tensor,
    write_weight: Tensor, norm_weight: Tensor, lm_head: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """pre [N, B, d] (slot 0 ignored), receiver_gate [N, B, m], candidate_ids [N, B-1, K] -> float32 [N, B-1, K, K]."""
    k = candidate_ids.shape[-1]
    previous = torch.cat((anchor_ids[:, None, None].expand(-1, 1, k), candidate_ids[:, :-1]), dim=1)
    m = write_weight.shape[1]
    rows = token_table[previous].float()
    z = torch.sigmoid(receiver_gate[:, 1:, None].float() + rows[..., m:]) * rows[..., :m]
    receiver = pre[:, 1:, None].float()
    refined = receiver + receiver.norm(dim=-1, keepdim=True) / pre.shape[-1] ** 0.5 * (z @ write_weight.float().T)
    refined = F.rms_norm(refined, (pre.shape[-1],), norm_weight.float(), eps)
    return refined @ lm_head[candidate_ids].float().transpose(-1, -2)


def lattice_walk_reference(
    scores: Tensor, candidate_ids: Tensor, temperature: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """One sequence and one slot at a time. -> tokens int64 [N, T], q float32 [N, T, K]"""
    tokens, q = torch.empty_like(candidate_ids[..., 0]), torch.zeros_like(scores[:, :, 0])
    for n in range(scores.shape[0]):
        index = 0
        for slot in range(scores.shape[1]):
            row = scores[n, slot, index]
            if temperature[n] > 0:
                q[n, slot] = torch.softmax(row / temperature[n], dim=-1)
                index = min(int((q[n, slot].cumsum(-1) <= uniforms[n, slot]).sum()), row.shape[0] - 1)
            else:
                index = int(row.argmax())
                q[n, slot, index] = 1.0
            tokens[n, slot] = candidate_ids[n, slot, index]
    return tokens, q
