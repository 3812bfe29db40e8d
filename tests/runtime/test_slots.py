"""Continuous batching: sequences come and go in slots, and every slot behaves like a sequence of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspine_export.checkpoint.pairing import read_target
from dspine_export.errors import UsageError
from dspine_export.lowering.onnx_export import export_onnx
from dspine_export.model.loading import load_checkpoint
from dspine_export.model.output import DraftOutput
from dspine_export.runtime import context_cache
from dspine_export.runtime.executor import DrafterExecutor
from dspine_export.runtime.onnx_executor import OnnxExecutor
from dspine_export.runtime.slot_rows import row_list
from tests.runtime.conftest import Opened
from tests.runtime.pairs import Pair

WIDTH, DRAFTED, VOCABULARY = 64, 3, 260
SLOTS, STEPS = 5, 6


@pytest.fixture(scope="module", params=["torch", "onnxruntime"])
def executor(
    request: pytest.FixtureRequest, tiny_pair: Pair, tiny: Opened, tmp_path_factory: pytest.TempPathFactory
) -> DrafterExecutor:
    if request.param == "torch":
        return tiny[1]
    folder: Path = tmp_path_factory.mktemp("portable")
    checkpoint = load_checkpoint(tiny_pair.drafter).checkpoint
    export_onnx(checkpoint, read_target(tiny_pair.target), folder, dtype="float32", form="portable")
    return OnnxExecutor(checkpoint.config, folder, tiny[0].embed_tokens, tiny[0].lm_head)


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def test_slots_equal_sequences_of_their_own(executor: DrafterExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random traffic: appends to some slots, rollbacks, resets, drafts of some slots in any order; the cache grows on the way."""
    monkeypatch.setattr(context_cache, "GROWTH_STEP", 8)
    generator = torch.Generator().manual_seed(3)
    state = executor.new_slots(SLOTS, 8)
    alone = [executor.new_state(1) for _ in range(SLOTS)]
    for step in range(STEPS):
        rows = torch.randperm(SLOTS, generator=generator)[: 1 + step % SLOTS].tolist()
        hidden = draw(generator, len(rows), 7, WIDTH)
        counts = torch.randint(0, 8, (len(rows),), generator=generator)
        executor.append_context(state, hidden, counts, rows)
        for n, row in enumerate(rows):
            executor.append_context(alone[row], hidden[n : n + 1], counts[n : n + 1])
        if step == 2:
            executor.truncate(state, state.lengths[rows[:2]] // 2, rows[:2])
            for row in rows[:2]:
                executor.truncate(alone[row], alone[row].lengths // 2)
        if step == 4:
            executor.reset(state, rows=[rows[0]])
            alone[rows[0]] = executor.new_state(1)
        assert state.lengths.tolist() == [int(each.lengths) for each in alone]
        _drafts_equal(executor, state, alone, rows[::-1], generator)
    assert state.capacity > 8


def _drafts_equal(
    executor: DrafterExecutor, state: object, alone: list[object], rows: list[int], generator: torch.Generator
) -> None:
    anchors = torch.randint(0, VOCABULARY, (len(rows),), generator=generator)
    heat = torch.tensor([0.0, 0.8, 1.2, 0.0, 0.5])[: len(rows)]
    uniforms = torch.rand(len(rows), DRAFTED, generator=generator)
    together = executor.draft_from(state, anchors, heat, uniforms, rows=torch.tensor(rows))
    for n, row in enumerate(rows):
        one = slice(n, n + 1)
        _same(together, executor.draft_from(alone[row], anchors[one], heat[one], uniforms[one]), n)


def _same(together: DraftOutput, single: DraftOutput, n: int) -> None:
    assert torch.equal(together.tokens[n], single.tokens[0])
    assert together.q is not None and single.q is not None
    torch.testing.assert_close(together.q[n], single.q[0], atol=1e-5, rtol=1e-4)


def test_a_slot_serves_several_sequences(executor: DrafterExecutor) -> None:
    """What the last sequence left in a slot is gone after `reset`."""
    generator = torch.Generator().manual_seed(4)
    state = executor.new_slots(2)
    executor.append_context(state, draw(generator, 2, 9, WIDTH), torch.tensor([9, 5]))
    executor.reset(state, [1])
    anchors, heat, uniforms = torch.tensor([7]), torch.zeros(1), torch.zeros(1, DRAFTED)
    emptied = executor.draft_from(state, anchors, heat, uniforms, rows=[1])
    assert torch.equal(emptied.tokens, executor.draft_from(executor.new_state(1), anchors, heat, uniforms).tokens)
    executor.reset(state)
    assert state.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("rows", [[], [0, 0], [-1], [2], torch.tensor([5])])
def test_rows_that_are_none(executor: DrafterExecutor, rows: list[int]) -> None:
    state = executor.new_slots(2)
    calls: tuple[Callable[[], object], ...] = (
        lambda: executor.append_context(state, torch.zeros(1, 1, WIDTH), torch.ones(1, dtype=torch.int64), rows),
        lambda: executor.draft_from(state, torch.tensor([1]), torch.zeros(1), torch.zeros(1, DRAFTED), rows),
        lambda: executor.reset(state, rows),
        lambda: executor.truncate(state, torch.zeros(1, dtype=torch.int64), rows),
    )
    for call in calls:
        with pytest.raises(UsageError, match="not rows of the state"):
            call()


def test_limits(executor: DrafterExecutor) -> None:
    with pytest.raises(UsageError, match="at least one slot"):
        executor.new_slots(0)
    executor.max_batch = 2
    try:
        state = executor.new_slots(3)
        executor.append_context(state, torch.zeros(2, 1, WIDTH), torch.tensor([1, 1]), rows=[2, 0])
        with pytest.raises(UsageError, match="that many sequences"):
            executor.append_context(state, torch.zeros(3, 1, WIDTH), torch.tensor([1, 1, 1]))
        with pytest.raises(UsageError, match="One length per row"):
            executor.truncate(state, torch.zeros(3, dtype=torch.int64), rows=[1])
    finally:
        executor.max_batch = None


def test_all_rows_in_order_are_no_selection() -> None:
    assert row_list([0, 1, 2], 3) is None and row_list(None, 3) is None
    assert row_list([2, 1], 3) == [2, 1]
