"""The replayed acceptance length equals a real draft-verify loop with the specification model."""

from __future__ import annotations

from pathlib import Path

import torch

from dspine_export import load_checkpoint
from dspine_export.model.speculative import verify_greedy
from tools.train_drafter import build_drafter
from tools.training.acceptance import Replay, measure, replay, summarise
from tools.training.checkpoint import load_drafter, save_drafter
from tools.training.data import pack
from tools.training.drafter import DrafterShape
from tools.training.generate import generate
from tools.training.target import Target


def test_replay_hops() -> None:
    assert replay([2, 9, 9, 0, 0], 3) == Replay(committed=4, calls=2, kept=(1, 1, 0))
    assert replay([0], 3) == Replay(0, 0, (0, 0, 0))
    assert summarise([Replay(6, 2, (2, 1)), Replay(2, 2, (0, 0))])["tau"] == 2.0


def test_measure_equals_a_real_loop(target: Target, shape: DrafterShape, tmp_path: Path) -> None:
    prompts = [[1, 5, 9], [1, 7, 30, 44, 8], [4, 4, 61]]
    answers = generate(target, prompts, [0.0] * 3, max_new_tokens=40)
    save_drafter(build_drafter(shape, target, seed=2), target.shape.num_layers, tmp_path)
    measured = measure(load_drafter(tmp_path, target), target, pack(prompts, answers), size=2)
    specification = load_checkpoint(tmp_path).bind(embed_tokens=target.embed, lm_head=target.head)
    for prompt, answer, result in zip(prompts, answers, measured, strict=True):
        ids, calls = [*prompt, answer[0]], 0
        wanted = len(prompt) + len(answer)
        while len(ids) < wanted:
            tapped, _ = target.forward(torch.tensor([ids[:-1]]), shape.taps)
            draft = specification.draft(torch.tensor(ids[-1:]), tapped, torch.tensor([len(ids) - 1])).tokens
            block = torch.tensor([ids + draft[0].tolist()])
            _, final = target.forward(block)
            verdict = verify_greedy(final[:, len(ids) - 1 :] @ target.head.T, draft)
            ids += [*draft[0, : int(verdict.accepted)].tolist(), int(verdict.next_token)]
            calls += 1
        assert ids[:wanted] == [*prompt, *answer]
        assert (result.committed, result.calls) == (len(answer) - 1, calls)
