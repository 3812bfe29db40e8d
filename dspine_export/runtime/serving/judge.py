"""Which drafted tokens the target keeps, and the token after them, for a batch in which every row has its own rules.

As `model.speculative`, with three differences: rows have drafted different numbers of tokens, rows bring their own temperature and
nucleus, and the random numbers are given instead of drawn, because they belong to the requests and not to the batch.
Symbols: N rows, T = 1 + the most tokens drafted by any row, V vocabulary rows, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspine_export.runtime.sampling import nucleus
from dspine_export.tolerance import NEAR_TIE


@dataclass(frozen=True)
class Rules:
    """How the rows choose their tokens.

    Attributes:
        widths: int64 [N], drafted tokens to check, 0 .. T-1.
        sampled: int64 [M], the rows with a temperature above 0; the rest is greedy. None where there are none.
        temperature, top_p: float32 [M].
        accept: float32 [M, T-1] and after: float32 [M], uniform numbers of the sampled rows, in [0, 1).
    """

    widths: Tensor
    sampled: Tensor | None = None
    temperature: Tensor | None = None
    top_p: Tensor | None = None
    accept: Tensor | None = None
    after: Tensor | None = None


@dataclass(frozen=True)
class Verdicts:
    """int64 [N] each: drafted tokens kept, the token after them, whether the row's logits were finite, near-ties passed on the way."""

    accepted: Tensor
    following: Tensor
    finite: Tensor
    near_ties: Tensor


def judge(
    logits: Tensor,
    drafts: Tensor,
    candidate_ids: Tensor | None,
    q: Tensor | None,
    rules: Rules,
    *,
    count_near_ties: bool = False,
) -> Verdicts:
    """Judges one verification pass.

    Args:
        logits: float32 [N, T, V]. drafts: int64 [N, T-1].
        candidate_ids, q: int64 and float32 [N, T-1, K], what the drafts were drawn from; needed where a sampled row has drafted.
        count_near_ties: costs another pass over the logits.
    """
    slot = torch.arange(drafts.shape[1], device=drafts.device)
    within = slot < rules.widths[:, None]
    best, choice = logits.max(dim=-1)  # lowest index on ties, as argmax
    accepted = _leading_true((choice[:, :-1] == drafts) & within)
    following = choice.gather(1, accepted[:, None]).squeeze(1)
    near_ties = torch.zeros_like(accepted)
    if count_near_ties:
        second = logits.scatter(-1, choice.unsqueeze(-1), -torch.inf).amax(
            -1
        )  # a selection of two would take far longer
        passed = torch.arange(logits.shape[1], device=drafts.device) <= accepted[:, None]
        near_ties = ((best - second < NEAR_TIE) & passed).sum(1)
    finite = best.isfinite().all(dim=1).long()  # a NaN anywhere is the maximum
    if rules.sampled is not None:
        rows = rules.sampled
        kept, after = _judge_sampled(logits[rows], drafts, candidate_ids, q, within, rules)
        accepted, following = accepted.index_copy(0, rows, kept), following.index_copy(0, rows, after)
        near_ties = near_ties.index_fill(0, rows, 0)
    return Verdicts(accepted, following, finite, near_ties)


def _judge_sampled(
    logits: Tensor, drafts: Tensor, candidate_ids: Tensor | None, q: Tensor | None, within: Tensor, rules: Rules
) -> tuple[Tensor, Tensor]:
    """Rejection sampling (Leviathan et al. 2023) of the rows `rules.sampled`; logits [M, T, V] are theirs, the rest is the batch's."""
    rows, heat, accept, after = rules.sampled, rules.temperature, rules.accept, rules.after
    assert rows is not None and heat is not None and accept is not None and after is not None
    if rules.top_p is not None:
        logits = nucleus(logits, heat, rules.top_p)
    p = torch.softmax(logits / heat[:, None, None], dim=-1)  # [M, T, V]
    each = torch.arange(len(rows), device=rows.device)
    if candidate_ids is None or q is None or not drafts.shape[1]:
        return torch.zeros_like(rows), _inverse_cdf(p[:, 0], after)
    tokens, candidates, proposal = drafts[rows], candidate_ids[rows], q[rows]
    p_draft = p[:, :-1].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    q_draft = (proposal * (candidates == tokens.unsqueeze(-1))).sum(-1)
    kept = _leading_true((accept * q_draft < p_draft) & within[rows])
    rejected = kept < rules.widths[rows]
    slot = kept.clamp_max(tokens.shape[1] - 1)
    mass = p[each, kept]  # [M, V]
    residual = mass.scatter_add(1, candidates[each, slot], -torch.where(rejected[:, None], proposal[each, slot], 0.0))
    residual = residual.clamp_min(0)
    # p == q to the last bit leaves nothing to draw from, and then p itself is the right distribution.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, mass)
    return kept, _inverse_cdf(residual, after)


def choose(logits: Tensor, temperature: float, top_p: float, uniform: float) -> tuple[Tensor, Tensor]:
    """The token after a prompt and whether the logits were finite, scalars int64. logits float32 [V]"""
    best, token = logits.max(dim=-1)
    if temperature > 0:
        heat = torch.tensor([temperature], device=logits.device)
        p = torch.softmax(nucleus(logits[None], heat, top_p) / temperature, dim=-1)
        token = _inverse_cdf(p, torch.tensor([uniform], device=logits.device))[0]
    return token, best.isfinite().long()


def _inverse_cdf(mass: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulated mass exceeds the uniform number's share of the whole. mass [M, V], uniforms [M] -> int64 [M]"""
    cumulated = mass.double().cumsum(-1)  # float32 would lose the tail of a large vocabulary
    wanted = uniforms.double()[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, wanted, right=True).squeeze(1).clamp_max(mass.shape[1] - 1)


def _leading_true(matches: Tensor) -> Tensor:
    """Number of leading True per row. bool [N, T] -> int64 [N]"""
    return matches.long().cumprod(dim=1).sum(dim=1)
