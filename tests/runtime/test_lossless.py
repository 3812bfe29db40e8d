"""Greedy speculative output is the target's own, token for token: the example target, 20 evaluation prompts, float32 on the CPU.

With the shipped drafter, and with a stand-in that mostly proposes the right thing, so that every acceptance length occurs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine_export.errors import DependencyError, VerificationError
from dspine_export.example import find_example_gguf, materialise_example_target
from dspine_export.model.loading import load_checkpoint
from dspine_export.model.output import DraftOutput
from dspine_export.runtime import lossless
from dspine_export.runtime.generate import generate, generate_batch, generate_plain
from dspine_export.runtime.generation import GenerationResult, Settings
from dspine_export.runtime.load_target import open_target
from dspine_export.runtime.lossless import compare_greedy
from dspine_export.runtime.open_executor import open_executor
from dspine_export.runtime.prompts import encode_prompt, load_tokenizer
from dspine_export.runtime.target import TargetExecutor
from tests.runtime.conftest import Opened

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "out" / "smollm2-135m"  # where `make example` puts it
SHIPPED = ROOT / "recipes" / "example" / "drafter"
PROMPTS_PER_SET, LONGEST_PROMPT, NEW_TOKENS = 4, 140, 48


@dataclass(frozen=True)
class Example:
    target: TargetExecutor
    prompts: list[list[int]]
    plain: list[GenerationResult]


@pytest.fixture(scope="module")
def example() -> Example:
    """The example target with the shipped drafter's taps, and what it generates alone."""
    if not MODEL.exists():
        try:
            find_example_gguf()
        except DependencyError as error:
            pytest.skip(error.what)
    path = materialise_example_target(MODEL)
    target, tokenizer = open_target(path, load_checkpoint(SHIPPED).config.target_layer_ids), load_tokenizer(path)
    prompts: list[list[int]] = []
    for file in sorted((ROOT / "tests" / "data" / "prompts").glob("*.jsonl")):
        texts = [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines()]
        encoded = (encode_prompt(tokenizer, text) for text in texts)
        prompts += [
            ids
            for ids, _ in zip((e for e in encoded if len(e) <= LONGEST_PROMPT), range(PROMPTS_PER_SET), strict=False)
        ]
    assert len(prompts) == 20
    torch.set_num_threads(1)
    settings = Settings(NEW_TOKENS, eos_ids=target.eos_ids)
    return Example(target, prompts, generate_batch(target, None, prompts, settings))


def check(example: Example, results: Sequence[GenerationResult]) -> list[int]:
    """Positions of near-ties over all prompts."""
    ties = []
    for prompt, plain, result in zip(example.prompts, example.plain, results, strict=True):
        comparison = compare_greedy(
            example.target, prompt, result.token_ids, max_new_tokens=NEW_TOKENS, reference=plain.token_ids
        )
        comparison.require_equal()
        ties += comparison.near_ties
    assert sum(len(result.token_ids) for result in results) > 10 * len(results)
    return ties


@pytest.mark.slow
def test_the_example_pair_prompt_by_prompt(example: Example) -> None:
    """What `run` does, 20 times."""
    target = example.target
    executor = open_executor("torch", SHIPPED, target.embed_tokens, target.lm_head)
    results = [generate(target, executor, prompt, max_new_tokens=NEW_TOKENS) for prompt in example.prompts]
    assert len(check(example, results)) <= 2
    calls = sum(result.statistics.target_calls for result in results)
    tokens = sum(result.statistics.committed_tokens for result in results)
    assert tokens / calls > 2.0, "the shipped drafter's acceptance length"


class MostlyRight:
    """Proposes the target's own continuation, now and then spoilt: every acceptance length occurs, rows run apart."""

    name, max_context, max_batch, attends_capacity = "mostly right", None, None, True

    def __init__(self, example: Example, block: int = 8) -> None:
        self.config: Any = SimpleNamespace(block_size=block, vocab_size=example.target.lm_head.shape[0])
        self.texts = [[*p, *r.token_ids, *[0] * block] for p, r in zip(example.prompts, example.plain, strict=True)]
        self.generator = torch.Generator().manual_seed(0)

    def new_state(self, batch: int, capacity: int = 0) -> Any:
        return SimpleNamespace(lengths=torch.zeros(batch, dtype=torch.int64), rows=torch.arange(batch))

    def append_context(self, state: Any, _target_hidden: Tensor, counts: Tensor) -> None:
        state.lengths = state.lengths + counts

    def select(self, state: Any, rows: Tensor) -> Any:
        return SimpleNamespace(lengths=state.lengths[rows], rows=state.rows[rows])

    def truncate(self, state: Any, lengths: Tensor) -> None:
        state.lengths = lengths

    def draft_from(self, state: Any, anchor_ids: Tensor, _temperature: Tensor, uniforms: Tensor) -> DraftOutput:
        rows = []
        for row, n, anchor in zip(state.rows.tolist(), state.lengths.tolist(), anchor_ids.tolist(), strict=True):
            text = self.texts[row]
            assert text[n] == anchor, "the anchor stands at position n"
            rows.append((text[n + 1 :] + [0] * 8)[: self.config.block_size - 1])
        tokens = torch.tensor(rows)
        spoilt = torch.rand(tokens.shape, generator=self.generator) < 0.2
        tokens = torch.where(spoilt, tokens + 1, tokens)
        certain = torch.ones(*tokens.shape, 1)
        return DraftOutput(tokens, tokens, tokens.unsqueeze(-1), None, certain)


@pytest.mark.slow
def test_a_ragged_batch_of_long_acceptances(example: Example) -> None:
    settings = Settings(NEW_TOKENS, eos_ids=example.target.eos_ids)
    drafter: Any = MostlyRight(example)
    results = generate_batch(example.target, drafter, example.prompts, settings)
    assert len(check(example, results)) <= 2
    lengths = [result.statistics.acceptance_length for result in results]
    assert 2.5 < sum(lengths) / len(lengths) < 7


def test_a_wrong_output_is_noticed(tiny: Opened) -> None:
    target, _ = tiny
    prompt = [3, 1, 4]
    right = generate_plain(target, prompt, max_new_tokens=12, eos_ids=[]).token_ids

    def compared(output: list[int]) -> lossless.GreedyComparison:
        return compare_greedy(target, prompt, output, max_new_tokens=12, eos_ids=[])

    assert compared(right).equal and compared(right).near_ties == ()
    wrong = [*right[:5], (right[5] + 1) % 200, *right[6:]]
    found = compared(wrong)
    assert (found.first_difference, found.expected, found.got) == (5, right[5], wrong[5]) and found.lead > 1e-4
    with pytest.raises(VerificationError, match=r"token 5[\s\S]*ahead by"):
        found.require_equal()
    assert compared(right[:7]).first_difference == 7, "ended too early"
    assert compared([*right, 5]).first_difference == 12, "went on too long"


def test_a_near_tie_is_counted_and_followed(tiny: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound so wide that every choice is a tie, the comparison goes on along the output's own branch."""
    target, _ = tiny
    prompt = [3, 1, 4]
    right = generate_plain(target, prompt, max_new_tokens=12, eos_ids=[]).token_ids
    branch = [*right[:5], (right[5] + 1) % 200]
    branch += generate_plain(target, [*prompt, *branch], max_new_tokens=6, eos_ids=[]).token_ids
    monkeypatch.setattr(lossless, "NEAR_TIE", 1e9)
    found = compare_greedy(target, prompt, branch, max_new_tokens=12, eos_ids=[])
    assert found.equal and found.near_ties == (5,)
