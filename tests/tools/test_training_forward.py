"""What is trained is what is shipped: the block pass equals the specification model on the written checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspine_export import load_checkpoint
from tools.train_drafter import build_drafter, column_scale
from tools.training.acceptance import draft_tokens
from tools.training.blocks import cut_blocks
from tools.training.checkpoint import load_drafter, save_drafter
from tools.training.data import Corpus, gather
from tools.training.drafter import DrafterShape, TrainDrafter, block_bias
from tools.training.target import Target

ROWS, TOLERANCE = [1, 4, 7], 2e-5


def randomise(drafter: TrainDrafter) -> None:
    """Give the zero-initialised writes and gates values, so that the injection is part of the comparison."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@pytest.mark.parametrize(("inject", "causal"), [(True, True), (False, True), (False, False)], ids=["dspine", "causal", "dflash"])
def test_block_pass_equals_specification(
    target: Target, corpus: Corpus, shape: DrafterShape, tmp_path: Path, inject: bool, causal: bool
) -> None:
    trained = build_drafter(replace(shape, inject=inject, causal=causal), target, seed=1)
    randomise(trained)
    save_drafter(trained, target.shape.num_layers, tmp_path)
    drafter = load_drafter(tmp_path, target)
    specification = load_checkpoint(tmp_path).bind(embed_tokens=target.embed, lm_head=target.head)

    batch = gather(corpus, ROWS, target.device)
    anchors = batch.prompts[:, None] + torch.tensor([0, 2, 5])  # three blocks stand side by side in one pass
    blocks = cut_blocks(batch, anchors, shape.block_size)
    inputs = torch.full_like(blocks.ids, shape.mask_token_id)
    inputs[..., 0] = blocks.ids[..., 0]
    tapped, _ = target.forward(batch.ids, shape.taps)
    bias = block_bias(anchors, batch.ids.shape[1], 3, shape.block_size, causal)
    with torch.no_grad():
        output = drafter(target.embed[inputs], tapped, blocks.ids, blocks.positions, bias)
        rows = (output.hidden.flatten(0, 1), output.pre_injection.flatten(0, 1), blocks.ids[..., 0].flatten())
        tokens = draft_tokens(drafter, *rows, target.head, refine=inject).view(len(ROWS), 3, -1)
    for block in range(3):
        reference = specification.draft(blocks.ids[:, block, 0], tapped, anchors[:, block], return_intermediates=True)
        layers = torch.stack([layer[:, block] for layer in output.layer_outputs], dim=1)
        torch.testing.assert_close(layers, reference.layer_outputs, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(output.pre_injection[:, block], reference.pre_injection, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(output.hidden[:, block], reference.hidden_states, atol=TOLERANCE, rtol=TOLERANCE)
        assert torch.equal(tokens[:, block], reference.tokens)


def test_tap_scale_folds_into_fc(target: Target, corpus: Corpus, shape: DrafterShape) -> None:
    drafter = build_drafter(shape, target, seed=1)
    batch = gather(corpus, ROWS, target.device)
    tapped, _ = target.forward(batch.ids, shape.taps)
    drafter.tap_scale.copy_(column_scale(target, batch, shape.taps))
    assert not torch.allclose(drafter.tap_scale, torch.ones_like(drafter.tap_scale))
    before = drafter.fc(tapped / drafter.tap_scale)
    drafter.fold()
    torch.testing.assert_close(drafter.fc(tapped), before, atol=1e-4, rtol=1e-4)
