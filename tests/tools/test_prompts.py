"""Training prompts keep their distance from the evaluation prompts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.build_prompts import Overlap, build
from tools.training.prompt_sources import BOXED, DATA, chat, function_writing
from tools.training.prompts import read_prompts

EVALUATION = sorted((Path(__file__).parents[1] / "data" / "prompts").glob("*.jsonl"))


@pytest.fixture(scope="module")
def overlap() -> Overlap:
    return Overlap(turn for path in EVALUATION for p in read_prompts(path) for turn in p["turns"])


def test_evaluation_sets_are_complete() -> None:
    sizes = {path.stem: len(read_prompts(path)) for path in EVALUATION}
    assert sizes == {"gsm8k": 200, "humaneval": 164, "math500": 200, "mbpp": 200, "mt-bench": 80}


def test_every_evaluation_prompt_is_recognised(overlap: Overlap) -> None:
    for path in EVALUATION:
        for prompt in read_prompts(path):
            assert overlap.hits(prompt["turns"][0])
            assert overlap.hits(prompt["turns"][0].removesuffix(BOXED) + "  ")


def test_shared_phrases_are_no_overlap(overlap: Overlap) -> None:
    assert not overlap.hits("How many marbles fit in Ulla's jar?" + BOXED)


def test_no_stored_question_is_an_evaluation_question() -> None:
    evaluation = {turn.removesuffix(BOXED).strip() for path in EVALUATION for p in read_prompts(path) for turn in p["turns"]}
    training = {p["turns"][0].strip() for p in read_prompts(DATA / "gsm8k_train.jsonl")}
    assert len(training) > 7000
    assert training.isdisjoint(evaluation)


def test_chat_and_function_prompts(overlap: Overlap) -> None:
    chats = list(chat(random.Random(1), 5))
    assert not [prompt for prompt in chats if "{" in prompt.replace("\\boxed{}", "")], "an unfilled slot"
    prompts = [*chats, *function_writing(random.Random(1), 60)]
    assert len(set(prompts)) > 300
    assert sum(overlap.hits(p) for p in prompts) < 0.02 * len(prompts)


@pytest.mark.slow
def test_built_prompts_have_no_overlap(overlap: Overlap) -> None:
    pytest.importorskip("reasoning_gym")
    rows = build(seed=1, scale=0.02, evaluation=EVALUATION)
    assert {row["source"] for row in rows} == {"gsm8k_train", "reasoning_gym", "functions", "chat"}
    assert not any(overlap.hits(str(row["turns"][0])) for row in rows)  # type: ignore[index]
