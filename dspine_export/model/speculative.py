"""Speculative verification: which drafted tokens the target keeps, and what it commits after them.

The target has run over [anchor, draft_1 .. draft_{B-1}]; its logits row i is the distribution of the token after slot i. The
acceptance length counts committed tokens per target call, the bonus (or correction) token included: 1 .. B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """Outcome per sequence.

    Attributes:
        accepted: int64 [N], drafted tokens kept, 0 .. B-1.
        next_token: int64 [N], the bonus or correction token: the next anchor.
    """

    accepted: Tensor
    next_token: Tensor


def verify_greedy(logits: Tensor, draft: Tensor) -> Verdict:
    """Keeps the longest prefix that equals the target's own greedy choice. logits [N, B, V], draft int64 [N, B-1]"""
    choice = logits.argmax(dim=-1)  # [N, B]
    accepted = _leading_true(choice[:, :-1] == draft)
    return Verdict(accepted, choice.gather(1, accepted[:, None]).squeeze(1))


def verify_sampled(
    logits: Tensor,
    draft: Tensor,
    candidate_ids: Tensor,
    q: Tensor,
    temperature: Tensor,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Exact rejection sampling (Leviathan et al. 2023) for a proposal that lives on K candidates per slot.

    Args:
        logits: [N, B, V] target logits.
        draft: int64 [N, B-1].
        candidate_ids, q: int64 and float32 [N, B-1, K]; q must be the rows the draft was sampled from.
        temperature: float32 [N]; rows with 0 are verified greedily.

    Returns:
        Committed tokens are distributed as the target's own samples.
    """
    heat = temperature.to(logits.device)
    p = torch.softmax(logits.float() / torch.where(heat > 0, heat, 1.0)[:, None, None], dim=-1)  # [N, B, V]
    p_draft = p[:, :-1].gather(-1, draft.unsqueeze(-1)).squeeze(-1)
    chosen = candidate_ids == draft.unsqueeze(-1)
    q_draft = (q * chosen).sum(-1)
    uniform = torch.rand(draft.shape, generator=generator, device=p.device)
    accepted = _leading_true(uniform * q_draft < p_draft)
    next_token = _resample(p, q, candidate_ids, accepted, generator)
    greedy = verify_greedy(logits, draft)
    sampled = heat > 0
    return Verdict(torch.where(sampled, accepted, greedy.accepted), torch.where(sampled, next_token, greedy.next_token))


def _resample(
    p: Tensor, q: Tensor, candidate_ids: Tensor, accepted: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Draws from max(p - q, 0) at the first rejected slot, or from p after a fully accepted block. -> int64 [N]"""
    rows = torch.arange(p.shape[0], device=p.device)
    residual = p[rows, accepted].clone()  # [N, V]
    rejected = accepted < q.shape[1]
    slot = accepted.clamp_max(q.shape[1] - 1)
    proposal = torch.where(rejected[:, None], q[rows, slot], 0.0)
    residual.scatter_add_(1, candidate_ids[rows, slot], -proposal)
    residual = residual.clamp_min(0)
    # p == q to the last bit leaves nothing to draw from, and then p itself is the right distribution.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p[rows, accepted])
    return torch.multinomial(residual, 1, generator=generator).squeeze(1)


def _leading_true(matches: Tensor) -> Tensor:
    """Number of leading True per row. bool [N, T] -> int64 [N]"""
    return matches.long().cumprod(dim=1).sum(dim=1)
