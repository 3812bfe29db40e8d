"""Does the loop leave the target's distribution alone? Greedy text against plain greedy text, sampled tokens by chi-square.

Sampled: many copies of one prefix run one round each. The first committed token of all copies must follow the target's distribution; so
must the second, among the copies whose first drafted token was kept and equals the most frequent one; and so on, one depth after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tools.training.drafter import TrainDrafter
from tools.training.generate import generate
from tools.training.measure_loop import run_loop
from tools.training.speculate import Loop
from tools.training.target import Target

SMALLEST_EXPECTED = 5.0  # draws a bin of the chi-square test must expect; rarer tokens share one


def greedy_exactness(
    target: Target, drafter: TrainDrafter, drafts_by: str, prompts: Sequence[Sequence[int]], room: int
) -> dict[str, Any]:
    """How many greedy answers of the loop equal the target's plain greedy decode, token for token."""
    plain = generate(target, prompts, [0.0] * len(prompts), room)
    loop = [d.answer for d in run_loop(target, drafter, drafts_by, prompts, 0.0, False, room)]
    same = [one == two for one, two in zip(plain, loop, strict=True)]
    first = [next((i for i, (x, y) in enumerate(zip(p, q, strict=False)) if x != y), None) for p, q in zip(plain, loop, strict=True)]
    return {
        "answers": len(same), "equal": sum(same), "tokens": sum(map(len, plain)), "dtype": str(target.dtype).removeprefix("torch."),
        "first_difference": [i for i, ok in zip(first, same, strict=True) if not ok],
    }  # fmt: skip


def chi_square(counts: Tensor, p: Tensor) -> float | None:
    """p-value of ``counts`` [V] under ``p`` [V]; None when the draws are too few for three bins."""
    expected = p.double() * counts.sum()
    frequent = expected >= SMALLEST_EXPECTED
    observed = torch.cat((counts[frequent].double(), counts[~frequent].double().sum()[None]))
    wanted = torch.cat((expected[frequent], expected[~frequent].sum()[None]))
    if wanted[-1] < SMALLEST_EXPECTED:  # fold the rest into the rarest frequent bin
        observed, wanted = (torch.cat((t[:-2], t[-2:].sum()[None])) for t in (observed, wanted))
    if len(wanted) < 3:
        return None
    statistic = ((observed - wanted).square() / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2).double(), statistic.cpu() / 2))


def _kolmogorov(values: Sequence[float]) -> float:
    """p-value of "these are uniform on [0, 1]" (Kolmogorov-Smirnov, asymptotic)."""
    ordered, n = sorted(values), len(values)
    gap = max(max((i + 1) / n - v, v - i / n) for i, v in enumerate(ordered))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * gap
    return min(max(2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)), 0.0), 1.0)


@torch.no_grad()
def sampled_exactness(
    target: Target,
    drafter: TrainDrafter,
    drafts_by: str,
    prompts: Sequence[Sequence[int]],
    sample: bool = True,
    draws: int = 2000,
    copies: int = 20,
    depths: int = 3,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Chi-square p-values of the committed tokens at depths 1 .. ``depths`` after every prefix (prompt and the target's first token)."""
    loop = Loop(target, drafter, drafts_by, prompts, 1)
    loop.prefill(temperature)
    loop.select(torch.arange(len(prompts), device=target.device).repeat_interleave(copies))
    tokens, accepted = [], []
    for _ in range(-(-draws // copies)):
        proposal = loop.draft(temperature, sample)
        verdict = loop.judge(proposal, temperature)
        block = torch.cat((proposal.tokens, verdict.following[:, None]), 1)
        block.scatter_(1, verdict.accepted[:, None], verdict.following[:, None])
        tokens.append(block.view(len(prompts), copies, -1))
        accepted.append(verdict.accepted.view(len(prompts), copies))
    drawn, kept = torch.cat(tokens, 1), torch.cat(accepted, 1)  # [P, draws, B], [P, draws]
    anchors = loop.ids.gather(1, loop.lengths[:, None])[::copies, 0]
    p_values = []
    for row, prompt in enumerate(prompts):
        p_values += _prefix_tests(target, [*prompt, int(anchors[row])], drawn[row], kept[row], depths, temperature)
    if not p_values:
        return {"prefixes": len(prompts), "tests": 0}
    below = sum(p < 0.05 for p in p_values)
    return {
        "prefixes": len(prompts), "draws_per_prefix": drawn.shape[1], "tests": len(p_values), "smallest_p": min(p_values),
        "bonferroni_p": min(min(p_values) * len(p_values), 1.0), "share_below_0.05": round(below / len(p_values), 4),
        "uniformity_p": _kolmogorov(p_values),
    }  # fmt: skip


def _prefix_tests(target: Target, prefix: list[int], drawn: Tensor, kept: Tensor, depths: int, temperature: float) -> list[float]:
    results = []
    alive = torch.ones_like(kept, dtype=torch.bool)
    for depth in range(depths):
        _, final = target.forward(torch.tensor([prefix], device=target.device))
        p = (final[0, -1].float() @ target.head.float().T / temperature).softmax(-1)
        counts = torch.bincount(drawn[alive, depth], minlength=len(p))
        value = chi_square(counts, p)
        if value is not None:
            results.append(value)
        usual = int(torch.bincount(drawn[alive & (kept > depth), depth], minlength=len(p)).argmax())
        alive = alive & (kept > depth) & (drawn[:, depth] == usual)
        if int(alive.sum()) < 200:
            break
        prefix = [*prefix, usual]
    return results
