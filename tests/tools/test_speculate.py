"""The batched draft-verify loop: greedy text is the target's own, counts agree with the replay, samples follow the target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tools.training.acceptance import measure
from tools.training.arms import ARMS, Starts, arm_shape
from tools.training.data import pack
from tools.training.drafter import DrafterShape, TrainDrafter
from tools.training.exactness import sampled_exactness
from tools.training.generate import generate
from tools.training.measure_loop import distinct, run_loop
from tools.training.target import Target

PROMPTS = [[1, 5, 9], [1, 7, 30, 44, 8], [4, 4, 61], [9, 9, 3, 50, 21, 17, 40]]
ROOM = 30


def random_drafter(target: Target, shape: DrafterShape, letter: str) -> TrainDrafter:
    drafter = Starts(target, shape.rank).build(arm_shape(ARMS[letter], shape, 6), seed=2)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return drafter.eval()


@pytest.mark.parametrize("letter", sorted(ARMS))
def test_greedy_loop_is_the_targets_text(target: Target, shape: DrafterShape, letter: str) -> None:
    answers = generate(target, PROMPTS, [0.0] * 4, ROOM)
    drafter = random_drafter(target, shape, letter)
    decodes = run_loop(target, drafter, ARMS[letter].drafts_by, PROMPTS, 0.0, False, ROOM)
    assert [d.answer for d in decodes] == answers
    assert [d.committed for d in decodes] == [len(a) - 1 for a in answers]
    if letter in "aeg":  # the replay knows the plain and the refined draft
        replays = measure(drafter, target, pack(PROMPTS, answers), refine=letter == "e")
        assert [(d.calls, tuple(d.kept)) for d in decodes] == [(r.calls, r.kept) for r in replays]
    for decode in decodes:
        assert all(covered <= decode.whole for covered in decode.covered)
        assert decode.oracle <= decode.whole * (shape.block_size - 1)


@pytest.mark.parametrize("sample", [True, False], ids=["sampled", "argmax"])
@pytest.mark.parametrize("letter", ["a", "c", "d", "e"])
def test_samples_follow_the_target(target: Target, shape: DrafterShape, letter: str, sample: bool) -> None:
    torch.manual_seed(3)
    drafter = random_drafter(target, replace(shape, top_k=4), letter)
    report = sampled_exactness(target, drafter, ARMS[letter].drafts_by, PROMPTS, sample=sample, draws=1500, copies=250, depths=2)
    assert report["tests"] >= 4
    assert report["smallest_p"] > 0.01 / report["tests"], report
    assert report["uniformity_p"] > 0.001, report


def test_a_wrong_q_is_noticed(target: Target, shape: DrafterShape, monkeypatch: pytest.MonkeyPatch) -> None:
    import tools.training.speculate as speculate

    def wrong(logits: torch.Tensor, proposal: object, temperature: float) -> object:
        flat = replace(proposal, chosen_q=torch.full_like(proposal.chosen_q, 1e-3))  # type: ignore[type-var,attr-defined]
        return verify(logits, flat, temperature)  # type: ignore[arg-type]

    verify = speculate.verify
    monkeypatch.setattr(speculate, "verify", wrong)
    drafter = random_drafter(target, shape, "e")
    report = sampled_exactness(target, drafter, "lattice", PROMPTS, sample=True, draws=1000, copies=250, depths=1)
    assert report["smallest_p"] < 1e-6


def test_distinct() -> None:
    assert distinct([[1, 1, 1, 1], [1, 2, 3, 4]], 2) == [0.625, pytest.approx(0.6667, abs=1e-4)]
