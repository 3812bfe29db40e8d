"""The drafter's layers on this package's kernels over vLLM's kind of cache, against the torch model. vLLM's modules are imitated."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_export.model.drafter import Drafter
from dspine_export.vllm.fused_backbone import FusedBackbone
from tests.vllm.imitated import BLOCK, DEVICE, LENGTHS, MASK, as_vllm, block_rows, random_drafter, taps_of, with_context


@pytest.fixture(scope="module")
def drafter() -> Iterator[Drafter]:
    made = random_drafter()
    with torch.inference_mode():
        yield made


@pytest.fixture(params=[64, 0], ids=["our products", "the vendor's"])
def served(
    request: pytest.FixtureRequest, drafter: Drafter
) -> tuple[FusedBackbone, dict[str, Any], Tensor, list[Tensor]]:
    """The backbone after the context of three requests was stored: itself, attention metadata, states and block tables."""
    backbone = FusedBackbone(as_vllm(drafter), requests=4, longest=64, few=request.param)
    return backbone, *with_context(backbone)


def test_layers_equal_the_torch_model(served: Any, drafter: Drafter) -> None:
    """Three requests, one without a context, and a fourth of padding; twice, as a graph replays."""
    backbone, metadata, table, states = served
    anchors = torch.tensor([3, 41, 59], device=DEVICE)
    wanted = drafter.draft(anchors, taps_of(states), torch.tensor(LENGTHS, device=DEVICE), return_intermediates=True)
    ids, positions, metadata = block_rows(metadata, table, anchors)
    for _ in range(2):
        got = backbone.run(ids, positions, metadata)
        assert got is not None
        assert wanted.layer_outputs is not None
        torch.testing.assert_close(
            got.view(4, BLOCK, -1)[:3], wanted.pre_injection.view(3, BLOCK, -1), rtol=1e-4, atol=1e-4
        )
        assert torch.equal(backbone.last.anchor_ids[:3], anchors)
        if backbone.last.sums is not None:
            torch.testing.assert_close(backbone.last.sums.sum(0), got.pow(2).sum(1), rtol=1e-4, atol=1e-3)


def test_without_a_cache_blocks_see_themselves(served: Any) -> None:
    """While vLLM measures memory there is no cache yet; an empty context gives the same."""
    backbone, metadata, _, _ = served
    ids, positions = (
        torch.full((2 * BLOCK,), MASK, device=DEVICE),
        torch.zeros(2 * BLOCK, dtype=torch.int64, device=DEVICE),
    )
    alone = backbone.run(ids, positions, None).clone()
    torch.testing.assert_close(alone, backbone.run(ids, positions, metadata))


def test_what_it_does_not_know_is_left_to_vllm(served: Any) -> None:
    backbone, metadata, _, _ = served
    ids, positions = torch.full((BLOCK,), MASK, device=DEVICE), torch.zeros(BLOCK, dtype=torch.int64, device=DEVICE)
    assert backbone.run(ids[:-1], positions[:-1], metadata) is None
    assert backbone.run(ids, positions, [metadata]) is None
    assert backbone.run(ids, positions, dict.fromkeys(metadata, SimpleNamespace())) is None
    states, slots = torch.randn(2, 64, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert not backbone.store(states, slots, [slots, slots.clone(), slots])
    assert not backbone.store(states, slots, [slots, None, slots])
    layer = backbone._backbone.layers[1].self_attn.attn
    layer.kv_cache = layer.kv_cache[:, :1]
    assert backbone.run(ids, positions, metadata) is None
    assert not backbone.store(states, slots, slots)
