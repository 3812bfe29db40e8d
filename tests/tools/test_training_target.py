"""The plain-torch target against transformers, and generation and loop detection on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.training.data import cut_loops
from tools.training.generate import generate
from tools.training.loops import loop_starts
from tools.training.target import Target

PROMPTS = [[1, 5, 9, 33], [1, 7, 30, 44, 8, 8, 60], [4, 4, 61]]


@pytest.fixture(scope="module")
def reference(target_dir: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()


def test_taps_and_final_state(target: Target, reference: torch.nn.Module) -> None:
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        states = reference(ids, output_hidden_states=True).hidden_states
    tapped, final = target.forward(ids, (0, 3))
    torch.testing.assert_close(tapped, torch.cat([states[1], states[4]], -1), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(final, states[-1], atol=1e-5, rtol=1e-4)


def test_greedy_generation(target: Target, reference: torch.nn.Module) -> None:
    answers = generate(target, PROMPTS, [0.0] * 3, max_new_tokens=30, batch=2)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(ids, max_new_tokens=30, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=2)
        assert answer == expected[0, len(prompt) :].tolist()


def test_temperatures_share_a_batch(target: Target) -> None:
    torch.manual_seed(0)
    greedy = generate(target, PROMPTS, [0.0] * 3, max_new_tokens=12)
    mixed = generate(target, PROMPTS, [0.0, 2.0, 0.0], max_new_tokens=12)
    assert (mixed[0], mixed[2]) == (greedy[0], greedy[2])
    assert mixed[1] != greedy[1]


def test_loops_are_cut_where_they_start() -> None:
    plain = list(range(60))
    repeating = [*range(100, 110), *[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13] * 3, 77]
    twice = [*range(10), *range(200, 213), *range(200, 213)]
    stuck = [5, 6] + [9] * 40
    kept, cut = cut_loops([plain, repeating, twice, stuck])
    assert cut == 2
    assert (kept[0], kept[2]) == (plain, twice)
    assert kept[1] == list(range(100, 110))
    assert kept[3] == [5, 6]


def test_padding_is_no_loop() -> None:
    tokens = torch.zeros(1, 80, dtype=torch.int64)
    tokens[0, :10] = torch.arange(10) + 1
    assert loop_starts(tokens, torch.tensor([10])).tolist() == [10]
