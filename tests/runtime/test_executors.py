"""Executors behind one protocol: torch and ONNX Runtime draft the same tokens from the same states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspine_export.checkpoint.pairing import read_target
from dspine_export.errors import UsageError
from dspine_export.lowering.onnx_export import export_onnx
from dspine_export.model.loading import load_checkpoint
from dspine_export.runtime import context_cache
from dspine_export.runtime.executor import CachedExecutor, DrafterExecutor
from dspine_export.runtime.generate import generate
from dspine_export.runtime.onnx_executor import OnnxExecutor
from dspine_export.runtime.open_executor import open_executor
from tests.runtime.conftest import Opened
from tests.runtime.pairs import Pair

WIDTH, SLOTS = 64, 3


@pytest.fixture(scope="module")
def onnx_executor(tiny_pair: Pair, tiny: Opened, tmp_path_factory: pytest.TempPathFactory) -> DrafterExecutor:
    folder: Path = tmp_path_factory.mktemp("portable")
    checkpoint = load_checkpoint(tiny_pair.drafter).checkpoint
    export_onnx(checkpoint, read_target(tiny_pair.target), folder, dtype="float32", form="portable")
    return OnnxExecutor(checkpoint.config, folder, tiny[0].embed_tokens, tiny[0].lm_head)


def test_equal_drafts_from_equal_states(
    tiny: Opened, onnx_executor: DrafterExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged appends, a rollback, a growing cache, greedy and sampled rows together."""
    monkeypatch.setattr(context_cache, "GROWTH_STEP", 8)
    generator = torch.Generator().manual_seed(0)
    pair = (tiny[1], onnx_executor)
    states = [executor.new_state(3, 4) for executor in pair]
    heat = torch.tensor([0.0, 0.7, 1.3])
    for step, counts in enumerate(([5, 0, 2], [1, 6, 6], [9, 9, 3])):
        hidden = torch.randn(3, 9, WIDTH, generator=generator)
        anchors = torch.randint(0, 260, (3,), generator=generator)
        uniforms = torch.rand(3, SLOTS, generator=generator)
        for executor, state in zip(pair, states, strict=True):
            executor.append_context(state, hidden, torch.tensor(counts))
            if step == 1:
                executor.truncate(state, state.lengths - torch.tensor([2, 0, 1]))
        want, got = (e.draft_from(s, anchors, heat, uniforms) for e, s in zip(pair, states, strict=True))
        assert torch.equal(got.tokens, want.tokens) and torch.equal(got.unrefined_tokens, want.unrefined_tokens)
        assert got.candidate_ids is not None and want.candidate_ids is not None and got.q is not None
        assert torch.equal(got.candidate_ids, want.candidate_ids)
        torch.testing.assert_close(got.q, want.q, atol=1e-4, rtol=1e-4)
    assert states[0].lengths.tolist() == states[1].lengths.tolist() == [13, 15, 10]
    assert states[0].capacity == 16


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_equal_generations(tiny: Opened, onnx_executor: DrafterExecutor, temperature: float) -> None:
    target, torch_executor = tiny
    texts = [
        generate(target, executor, [4, 8, 15], max_new_tokens=24, temperature=temperature, eos_ids=[])
        for executor in (torch_executor, onnx_executor)
    ]
    assert texts[0] == texts[1]


def test_append_in_pieces_and_selection(tiny: Opened) -> None:
    """A plan takes only so many rows at once; finished sequences leave the batch."""
    executor = tiny[1]
    assert isinstance(executor, CachedExecutor)
    hidden, counts = torch.randn(3, 11, WIDTH), torch.tensor([11, 0, 7])
    whole, cut = executor.new_state(3), executor.new_state(3)
    executor.append_context(whole, hidden, counts)
    executor.max_tokens = 4
    try:
        executor.append_context(cut, hidden, counts)
    finally:
        executor.max_tokens = None
    assert torch.equal(cut.lengths, whole.lengths)
    for row, count in enumerate(counts.tolist()):
        torch.testing.assert_close(cut.keys[row, :, :, :count], whole.keys[row, :, :, :count])
    left = executor.select(whole, torch.tensor([2, 0]))
    assert left.lengths.tolist() == [7, 11] and torch.equal(left.values[0], whole.values[2])


def test_limits_and_shapes(tiny: Opened) -> None:
    executor = tiny[1]
    state = executor.new_state(2, 4)
    with pytest.raises(UsageError, match="wrong shape"):
        executor.append_context(state, torch.zeros(2, 3, WIDTH + 1), torch.tensor([1, 1]))
    with pytest.raises(UsageError, match="Counts"):
        executor.append_context(state, torch.zeros(2, 3, WIDTH), torch.tensor([4, 1]))
    executor.max_context, executor.max_batch = 6, 2
    try:
        small = executor.new_state(2, 4)
        assert small.capacity == 6
        with pytest.raises(UsageError, match="longer than this drafter executor"):
            executor.append_context(small, torch.zeros(2, 7, WIDTH), torch.tensor([7, 1]))
        with pytest.raises(UsageError, match="that many sequences"):
            executor.new_state(3)
    finally:
        executor.max_context = executor.max_batch = None


def test_opening(tiny_pair: Pair, tiny: Opened) -> None:
    tables = tiny[0].embed_tokens, tiny[0].lm_head
    assert open_executor("eager", tiny_pair.drafter, *tables).name == "eager"
    with pytest.raises(UsageError, match="Unknown drafter executor"):
        open_executor("tensor", tiny_pair.drafter, *tables)
    for name in ("onnxruntime", "tensorrt"):
        with pytest.raises(UsageError, match="compiled bundles"):
            open_executor(name, tiny_pair.drafter, *tables)
    with pytest.raises(UsageError, match="float32 on the CPU"):
        OnnxExecutor(tiny[1].config, tiny_pair.drafter, tables[0].bfloat16(), tables[1].bfloat16())
