"""Sampled speculative output is distributed as the target's own samples: chi-square on seeded draws from a tiny random pair."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspine_export.model.speculative import Verdict
from dspine_export.runtime import generate as loop
from dspine_export.runtime.generate import generate_batch
from dspine_export.runtime.generation import Settings
from dspine_export.runtime.load_target import open_target
from dspine_export.runtime.sampling import nucleus, sample
from tests.runtime.conftest import Opened, opened
from tests.runtime.pairs import Pair, write_drafter, write_target

VOCAB, PROMPT, TOKENS, BATCH, SEEDS = 6, [2, 5, 1], 3, 4000, 2


@pytest.fixture(scope="module", params=["DSpineDraftModel", "DFlashDraftModel"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    folder: Path = tmp_path_factory.mktemp("small")
    target = write_target(folder / "target", vocab_size=VOCAB, num_hidden_layers=3, spread=0.25)
    sizes = {"dspine_config": {"transfer_rank": 4, "message_size": 5, "top_k": 3}, "architectures": [request.param]}
    drafter = write_drafter(folder / "drafter", target, open_target(target, ()).lm_head, **sizes)
    return opened(Pair(target, drafter), (0, 2))


def exact(opened_pair: Opened, temperature: float, top_p: float) -> Tensor:
    """Probability of every continuation of TOKENS tokens, float64 [V] * TOKENS."""
    target, _ = opened_pair
    texts = [[*PROMPT, *rest] for rest in itertools.product(range(VOCAB), repeat=TOKENS - 1)]
    state = target.new_state(len(texts), len(texts[0]))
    target.prefill(state, [PROMPT] * len(texts), lambda _hidden, _counts: None)
    state.lengths = state.lengths - 1
    logits = target.verify(state, torch.tensor([text[len(PROMPT) - 1 :] for text in texts])).logits
    heat = torch.full((len(texts),), temperature)
    p = (nucleus(logits, heat, top_p) / temperature).softmax(-1).double().view(*[VOCAB] * (TOKENS - 1), TOKENS, VOCAB)
    first, second, third = p[0, 0, 0], p[:, 0, 1], p[:, :, 2]
    return first[:, None, None] * second[:, :, None] * third


def draw(opened_pair: Opened, temperature: float, top_p: float) -> tuple[Tensor, int]:
    counts, accepted = torch.zeros([VOCAB] * TOKENS), 0
    for seed in range(SEEDS):
        settings = Settings(TOKENS, temperature, top_p, seed=seed)
        for result in generate_batch(*opened_pair, [PROMPT] * BATCH, settings):
            counts[tuple(result.token_ids)] += 1
            accepted += result.statistics.accepted_tokens
    return counts, accepted


def surprise(counts: Tensor, p: Tensor) -> float:
    """The chi-square statistic as standard deviations of a normal variable (Wilson and Hilferty); rare cells are pooled."""
    expected = p.flatten() * counts.sum()
    common = expected >= 5
    cells = [(counts.flatten()[common], expected[common])]
    if float(expected[~common].sum()) > 0:
        cells.append((counts.flatten()[~common].sum()[None], expected[~common].sum()[None]))
    seen, wanted = (torch.cat(parts).double() for parts in zip(*cells, strict=True))
    assert float(seen[wanted == 0].sum()) == 0, "drew something that cannot be drawn"
    chi, free = float(((seen - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    return ((chi / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.8)])
def test_distribution(small: Opened, temperature: float, top_p: float) -> None:
    p = exact(small, temperature, top_p)
    assert float(p.sum()) == pytest.approx(1)
    counts, accepted = draw(small, temperature, top_p)
    drafted = (TOKENS - 1) * BATCH * SEEDS
    assert 0.02 * drafted < accepted < 0.98 * drafted, "both acceptance and rejection are exercised"
    assert surprise(counts, p) < 4


def test_the_test_notices_a_verifier_that_ignores_q(small: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The common mistake: accept with min(1, p), resample from p."""

    def naive(logits: Tensor, draft: Tensor, *rest: object) -> Verdict:
        p = logits.softmax(-1)
        kept = (
            (torch.rand(draft.shape) < p[:, :-1].gather(-1, draft.unsqueeze(-1)).squeeze(-1)).long().cumprod(1).sum(1)
        )
        return Verdict(kept, torch.multinomial(p[torch.arange(len(kept)), kept], 1).squeeze(1))

    monkeypatch.setattr(loop, "verify_sampled", naive)
    torch.manual_seed(0)
    assert surprise(draw(small, 1.0, 1.0)[0], exact(small, 1.0, 1.0)) > 6


def test_same_seed_same_text(tiny: Opened) -> None:
    def tokens(seed: int) -> list[int]:
        return loop.generate(*tiny, [1, 2, 3], max_new_tokens=20, temperature=1.0, seed=seed, eos_ids=[]).token_ids

    assert tokens(3) == tokens(3) != tokens(4)


def test_nucleus() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()
    heat = torch.ones(2)
    assert nucleus(logits, heat, 1.0) is logits
    assert nucleus(logits, heat, 0.79).isinf().tolist() == [[False, False, True, True], [True, True, False, False]]
    assert nucleus(logits, heat, 1e-9).isinf().sum().item() == 6, "the most likely token always stays"
    sharp = nucleus(logits, torch.tensor([1.0, 0.1]), 0.9)
    assert sharp.isinf().tolist() == [[False, False, False, True], [True, True, True, False]]
    block = nucleus(logits.view(1, 2, 4), torch.ones(1), 0.79)
    assert block.isinf().sum().item() == 4


def test_rows_at_temperature_zero_are_greedy() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0]] * 400)
    heat = torch.tensor([0.0, 1.0]).repeat(200)
    drawn = sample(logits, heat, torch.Generator().manual_seed(0))
    assert set(drawn[0::2].tolist()) == {1} and set(drawn[1::2].tolist()) == {0, 1, 2}
