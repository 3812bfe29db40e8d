"""Verification commits what the target alone would have produced: exactly when greedy, in distribution when sampled."""

from __future__ import annotations

import pytest
import torch

from dspine_export.model.speculative import verify_greedy, verify_sampled
from dspine_export.model.transition import walk

CHI_SQUARE_P001 = 20.5  # 5 degrees of freedom; the tables here have 4 or fewer


def one_hot_logits(choices: list[list[int]], vocabulary: int = 10) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(choices), vocabulary).float()


@pytest.mark.parametrize(
    ("draft", "accepted", "following"),
    [([1, 2, 3], 3, 4), ([1, 2, 9], 2, 3), ([9, 2, 3], 0, 1), ([1, 9, 3], 1, 2)],
    ids=["all", "last wrong", "first wrong", "a right one after a wrong one"],
)
def test_greedy(draft: list[int], accepted: int, following: int) -> None:
    verdict = verify_greedy(one_hot_logits([[1, 2, 3, 4]]), torch.tensor([draft]))
    assert verdict.accepted.tolist() == [accepted] and verdict.next_token.tolist() == [following]


def test_greedy_rows_are_independent() -> None:
    logits = one_hot_logits([[1, 2, 3], [4, 5, 6]])
    verdict = verify_greedy(logits, torch.tensor([[1, 9], [4, 5]]))
    assert verdict.accepted.tolist() == [1, 2] and verdict.next_token.tolist() == [2, 6]


def test_zero_temperature_is_greedy() -> None:
    torch.manual_seed(0)
    logits, draft = torch.randn(64, 4, 8), torch.randint(0, 8, (64, 3))
    ids = draft.unsqueeze(-1)
    verdict = verify_sampled(logits, draft, ids, torch.ones(64, 3, 1), torch.zeros(64), None)
    want = verify_greedy(logits, draft)
    assert torch.equal(verdict.accepted, want.accepted) and torch.equal(verdict.next_token, want.next_token)


def test_a_proposal_equal_to_the_target_is_always_accepted() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 3, 4).expand(500, -1, -1)
    ids = torch.arange(4).expand(500, 2, 4)
    scores = logits[:, :2, None, :].expand(-1, -1, 4, -1).contiguous()
    heat = torch.ones(500)
    draft, q = walk(scores, ids, heat, torch.rand(500, 2))
    verdict = verify_sampled(logits, draft, ids, q, heat, None)
    assert bool((verdict.accepted == 2).all())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_committed_tokens_follow_the_target(temperature: float) -> None:
    """Chi-square of the first token, and of the second given the first, for a proposal limited to 3 of 5 candidates.

    The target's logits depend on the drafted prefix through a table, as a language model's do.
    """
    vocabulary, k, count = 5, 3, 40000
    generator = torch.Generator().manual_seed(7)
    first = 1.5 * torch.randn(vocabulary, generator=generator)
    second = 1.5 * torch.randn(vocabulary, vocabulary, generator=generator)  # row: the first token
    ids = torch.tensor([[[4, 0, 2], [1, 3, 0]]]).expand(count, -1, -1)
    scores = torch.randn(1, 2, k, k, generator=generator)
    scores[:, 0] = scores[:, 0, :1]
    heat = torch.full((count,), temperature)
    draft, q = walk(scores.expand(count, -1, -1, -1), ids, heat, torch.rand(count, 2, generator=generator))
    logits = torch.stack((first.expand(count, -1), second[draft[:, 0]], torch.zeros(count, vocabulary)), dim=1)
    verdict = verify_sampled(logits, draft, ids, q, heat, generator)

    # First committed token: the draft's if it was accepted, else the correction.
    one = torch.where(verdict.accepted >= 1, draft[:, 0], verdict.next_token)
    p_first = torch.softmax(first / temperature, 0).double()
    check_chi_square(torch.bincount(one, minlength=vocabulary), p_first)
    # Second committed token, where this round committed one: its distribution given the first is the target's.
    kept = verdict.accepted >= 1
    two = torch.where(verdict.accepted >= 2, draft[:, 1], verdict.next_token)
    for token in draft[:, 0].unique().tolist():
        chosen = kept & (draft[:, 0] == token)
        p_second = torch.softmax(second[token] / temperature, 0).double()
        check_chi_square(torch.bincount(two[chosen], minlength=vocabulary), p_second)
    assert 0.05 < float((verdict.accepted == 2).float().mean()) < 0.95  # the test saw both outcomes


def check_chi_square(counts: torch.Tensor, p: torch.Tensor) -> None:
    want = p * counts.sum()
    statistic = float(((counts.double() - want).square() / want).sum())
    assert statistic < CHI_SQUARE_P001, statistic


def test_q_is_what_makes_it_exact() -> None:
    """The same check fails when the verifier is handed other numbers than the draft was drawn from."""
    count, vocabulary = 40000, 3
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor([0.0, 1.0, -1.0]).expand(count, 2, vocabulary)
    ids = torch.arange(vocabulary).expand(count, 1, vocabulary)
    heat = torch.ones(count)
    scores = torch.tensor([2.0, 0.0, 0.0]).expand(count, 1, vocabulary, vocabulary)
    draft, q = walk(scores, ids, heat, torch.rand(count, 1, generator=generator))
    wrong = torch.full_like(q, 1 / vocabulary)
    verdict = verify_sampled(logits, draft, ids, wrong, heat, generator)
    one = torch.where(verdict.accepted >= 1, draft[:, 0], verdict.next_token)
    p = torch.softmax(logits[0, 0], 0).double()
    with pytest.raises(AssertionError):
        check_chi_square(torch.bincount(one, minlength=vocabulary), p)


def test_generator_makes_verdicts_reproducible() -> None:
    torch.manual_seed(0)
    logits, draft = torch.randn(32, 3, 6), torch.randint(0, 6, (32, 2))
    ids, q = torch.arange(6).expand(32, 2, 6), torch.full((32, 2, 6), 1 / 6)
    verdicts = [
        verify_sampled(logits, draft, ids, q, torch.ones(32), torch.Generator().manual_seed(5)) for _ in range(2)
    ]
    assert torch.equal(verdicts[0].accepted, verdicts[1].accepted)
    assert torch.equal(verdicts[0].next_token, verdicts[1].next_token)
