"""Verdicts for rows with different rules."""

from __future__ import annotations

import torch

from dspine_export.model.speculative import verify_greedy
from dspine_export.runtime.serving.judge import Rules, choose, judge


def test_greedy_rows_agree_with_the_model_layer() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, 6, generator=generator)
    drafts = logits[:, :3].argmax(-1)
    drafts[0, 1] = drafts[1, 0] = 5
    want = verify_greedy(logits, drafts)
    got = judge(logits, drafts, None, None, Rules(torch.full((5,), 3)))
    assert torch.equal(got.accepted, want.accepted) and torch.equal(got.following, want.next_token)
    assert got.finite.tolist() == [1] * 5


def test_width_bounds_what_is_accepted() -> None:
    logits = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1))
    drafts = logits[:, :3].argmax(-1)
    got = judge(logits, drafts, None, None, Rules(torch.tensor([0, 1, 2, 3])))
    assert got.accepted.tolist() == [0, 1, 2, 3]
    assert got.following.tolist() == [int(logits[n, n].argmax()) for n in range(4)]


def test_values_that_are_not_finite_are_told_apart() -> None:
    logits = torch.zeros(3, 2, 4)
    logits[1, 1, 2] = torch.nan
    logits[2, 0, :3] = -torch.inf  # a masked vocabulary is fine
    got = judge(logits, torch.zeros(3, 1, dtype=torch.int64), None, None, Rules(torch.ones(3, dtype=torch.int64)))
    assert got.finite.tolist() == [1, 0, 1]


def test_near_ties_are_counted_up_to_the_last_token() -> None:
    logits = torch.tensor([[[1.0, 0.99995], [3.0, 0.0], [5.0, 5.0]]])
    rules = Rules(torch.tensor([2]))
    kept = judge(logits, torch.tensor([[0, 0]]), None, None, rules, count_near_ties=True)
    assert kept.accepted.tolist() == [2] and kept.near_ties.tolist() == [2]
    cut = judge(logits, torch.tensor([[1, 0]]), None, None, rules, count_near_ties=True)
    assert cut.accepted.tolist() == [0] and cut.near_ties.tolist() == [1]


def test_sampled_rows_follow_the_target() -> None:
    """Frequencies of two tokens over many rows, against the target's distribution at a temperature with a nucleus."""
    rows, generator = 60_000, torch.Generator().manual_seed(2)
    table = torch.tensor([[2.0, 1.0, 0.5, -1.0, 0.0], [0.0, 2.0, 0.1, 1.0, -2.0]])
    proposal, heat, top_p = torch.tensor([0.5, 0.3, 0.2]), 0.7, 0.9
    candidates = torch.tensor([0, 3, 1])
    slot = torch.multinomial(proposal, rows, replacement=True, generator=generator)
    draws = torch.rand(rows, 2, generator=generator)
    every = torch.arange(rows)
    rules = Rules(
        torch.ones(rows, dtype=torch.int64), every, torch.full((rows,), heat), torch.full((rows,), top_p),
        draws[:, :1], draws[:, 1].contiguous(),
    )  # fmt: skip
    got = judge(
        table.expand(rows, 2, 5),
        candidates[slot][:, None],
        candidates.expand(rows, 1, 3),
        proposal.expand(rows, 1, 3),
        rules,
    )
    first = torch.where(got.accepted == 1, candidates[slot], got.following)
    p = (table[0] / heat).softmax(-1)
    keep = p >= 0.05  # the nucleus of 0.9 leaves out the least likely tokens
    order = p.sort(descending=True)
    inside = order.indices[: int((order.values.cumsum(0) - order.values < top_p).sum())]
    want = torch.zeros(5).index_copy(0, inside, p[inside]) / p[inside].sum()
    share = torch.bincount(first, minlength=5) / rows
    assert (share - want).abs().max() < 0.01 and bool(keep.any())
    bonus = torch.bincount(got.following[got.accepted == 1], minlength=5).float()
    assert (bonus / bonus.sum() - _cut((table[1] / heat).softmax(-1), top_p)).abs().max() < 0.015


def _cut(p: torch.Tensor, top_p: float) -> torch.Tensor:
    order = p.sort(descending=True)
    inside = order.indices[: int((order.values.cumsum(0) - order.values < top_p).sum())]
    return torch.zeros_like(p).index_copy(0, inside, p[inside]) / p[inside].sum()


def test_mixed_batch_leaves_greedy_rows_alone() -> None:
    logits = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(3))
    drafts = logits[:, :2].argmax(-1)
    rules = Rules(
        torch.tensor([2, 2, 1, 0]), torch.tensor([1, 3]), torch.tensor([0.5, 2.0]), None,
        torch.zeros(2, 2), torch.full((2,), 0.999),
    )  # fmt: skip
    got = judge(logits, drafts, drafts.unsqueeze(-1), torch.ones(4, 2, 1), rules)
    greedy = judge(logits, drafts, None, None, Rules(torch.tensor([2, 2, 1, 0])))
    assert got.accepted[[0, 2]].tolist() == greedy.accepted[[0, 2]].tolist()
    assert got.following[[0, 2]].tolist() == greedy.following[[0, 2]].tolist()
    assert got.accepted.tolist()[1] == 2, "a uniform number of 0 accepts everything"
    assert got.accepted.tolist()[3] == 0


def test_first_token() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert choose(logits, 0.0, 1.0, 0.0)[0].item() == 1
    assert choose(logits, 1.0, 1.0, 0.0)[0].item() == 0
    assert choose(logits, 1.0, 1.0, 0.999)[0].item() == 2
    assert choose(logits, 1.0, 0.5, 0.999)[0].item() == 1
    assert choose(torch.tensor([torch.nan, 1.0]), 0.0, 1.0, 0.0)[1].item() == 0
