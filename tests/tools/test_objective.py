"""The fused head loss against plain autograd, and the pieces around it."""

from __future__ import annotations

import pytest
import torch

import tools.training.objective as objective_module
from tools.train_drafter import block_loss, build_drafter
from tools.training.blocks import cut_blocks, rows_before, sample_anchors, slot_weights
from tools.training.data import Corpus, gather
from tools.training.drafter import DrafterShape
from tools.training.objective import (
    HeadTerms,
    Objective,
    ObjectiveConfig,
    Targets,
    _HeadLoss,
    chunk_terms,
    top_candidates,
)
from tools.training.target import Target


@pytest.mark.parametrize("tail_size", [0, 3])
def test_head_loss_and_gradient(monkeypatch: pytest.MonkeyPatch, tail_size: int) -> None:
    monkeypatch.setattr(objective_module, "CHUNK_ROWS", 4)
    torch.manual_seed(0)
    hidden, head = torch.randn(10, 8 + tail_size, requires_grad=True), torch.randn(50, 8)
    tail = torch.randn(50, tail_size, requires_grad=True) if tail_size else None
    weights = torch.rand(10)
    weights[3] = 0.0
    labels, q = torch.randint(0, 50, (10,)), torch.randn(10, 50).softmax(-1)
    targets = Targets(labels, labels, weights, q)
    terms = HeadTerms(*_HeadLoss.apply(hidden, tail, head, targets, 0.1, 7, chunk_terms(0.1)))
    inputs = [hidden] if tail is None else [hidden, tail]
    fused = torch.autograd.grad(3.0 * terms.loss, inputs)

    logits = hidden @ (head if tail is None else torch.cat((head, tail), 1)).T
    ce = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    l1 = (logits.softmax(-1) - q).abs().sum(-1)
    loss = (weights * (0.1 * ce + 0.9 * l1)).sum()
    torch.testing.assert_close(terms.loss, loss)
    for one, plain in zip(fused, torch.autograd.grad(3.0 * loss, inputs), strict=True):
        torch.testing.assert_close(one, plain, atol=1e-5, rtol=1e-4)
    assert torch.equal(terms.candidates, logits.topk(7, -1).indices)


def test_largest_entries_of_a_wide_row() -> None:
    logits = torch.randn(9, 128 * 40)
    assert torch.equal(top_candidates(logits, 16), logits.topk(16, -1).indices)


def test_schedule() -> None:
    config = ObjectiveConfig()
    assert config.schedule(0.0) == (0.0, 0.5)
    assert config.schedule(0.1) == (0.5, 0.5)
    assert config.schedule(0.25)[1] == pytest.approx(0.25)
    assert config.schedule(0.9) == (0.5, 0.0)


def test_blocks_stay_inside_the_answer(corpus: Corpus) -> None:
    batch = gather(corpus, range(len(corpus)), torch.device("cpu"))
    anchors = sample_anchors(batch, 40)
    assert bool((anchors >= batch.prompts[:, None]).all())
    assert bool((anchors <= batch.lengths[:, None] - 2).all()), "an anchor needs a successor"
    assert bool((anchors.amin(1) == batch.prompts).all()), "40 strata over a short answer reach its first token"
    blocks = cut_blocks(batch, anchors, 6)
    weights = slot_weights(blocks.valid, 7.0)
    assert weights[..., 0].eq(1).all()
    inside = anchors + 5 < batch.lengths[:, None]
    torch.testing.assert_close(weights[..., 4], inside * torch.tensor(-4 / 7).exp())
    positions = torch.arange(batch.ids.shape[1]).float().expand(len(corpus), -1)[..., None]
    before = rows_before(positions, blocks.positions)[..., 0]
    assert bool((before == blocks.positions[..., 1:] - 1)[blocks.valid[..., 1:]].all())


@pytest.mark.parametrize("refine", [True, False])
def test_every_trained_part_gets_a_gradient(target: Target, corpus: Corpus, shape: DrafterShape, refine: bool) -> None:
    drafter = build_drafter(shape, target, seed=1)
    with torch.no_grad():
        for write in drafter.injection.writes:
            write.weight.normal_()  # they start at zero, which would hide the message and gate gradients
    objective = Objective(ObjectiveConfig(refine=refine), target.head)
    loss, metrics = block_loss(drafter, target, objective, gather(corpus, [0, 1, 2], target.device), 4, progress=0.5)
    loss.backward()
    missing = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not missing
    assert ("refined" in metrics) is refine
