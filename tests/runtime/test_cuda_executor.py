"""The CUDA executor against the eager model; on a GPU with graphs, elsewhere under Triton's interpreter without them.

The loop's promises (no allocation, no synchronisation) can be checked on a GPU only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is imported
pytest.importorskip("triton", reason="Triton is not installed")

from dspine_export.errors import UsageError
from dspine_export.model.loading import load_checkpoint
from dspine_export.model.output import DraftOutput
from dspine_export.runtime import context_cache
from dspine_export.runtime.cuda_executor import CudaExecutor
from dspine_export.runtime.generate import generate_batch
from dspine_export.runtime.generation import Settings
from dspine_export.runtime.load_target import open_target
from dspine_export.runtime.open_executor import open_executor
from dspine_export.runtime.torch_executor import TorchExecutor
from tests.runtime.pairs import Pair, write_drafter

CUDA = torch.cuda.is_available()
WIDTH, DRAFTED, VOCABULARY = 64, 3, 260
Both = tuple[TorchExecutor, CudaExecutor]


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if CUDA else "cpu")


@pytest.fixture(scope="module", params=["dspine", "dflash"])
def both(
    request: pytest.FixtureRequest, tiny_pair: Pair, device: torch.device, tmp_path_factory: pytest.TempPathFactory
) -> Both:
    """The eager model and the kernels, bound to the same float32 tables."""
    target = open_target(tiny_pair.target, (), device=device)
    folder: Path = tiny_pair.drafter
    if request.param == "dflash":
        folder = tmp_path_factory.mktemp("dflash") / "drafter"
        write_drafter(folder, tiny_pair.target, target.lm_head.cpu(), architectures=["DFlashDraftModel"])
    checkpoint = load_checkpoint(folder)
    drafter = checkpoint.bind(embed_tokens=target.embed_tokens, lm_head=target.lm_head)
    return TorchExecutor(drafter), CudaExecutor(drafter)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_cache, "GROWTH_STEP", 16)


class Traffic:
    """The same random calls for both executors."""

    def __init__(self, both: Both, device: torch.device, seed: int) -> None:
        self.both, self.device = both, device
        self.generator = torch.Generator().manual_seed(seed)

    def append(self, states: list[Any], counts: list[int], tokens: int, rows: list[int] | None = None) -> None:
        hidden = torch.randn(len(counts), tokens, WIDTH, generator=self.generator).to(self.device)
        for executor, state in zip(self.both, states, strict=True):
            executor.append_context(state, hidden, torch.tensor(counts, device=self.device), rows)
        assert states[0].lengths.tolist() == states[1].lengths.tolist()

    def draft(self, states: list[Any], batch: int, rows: list[int] | None = None) -> None:
        anchors = torch.randint(0, VOCABULARY, (batch,), generator=self.generator).to(self.device)
        heat = torch.tensor([0.0, 0.8, 1.2, 0.0, 0.5])[:batch].to(self.device)
        uniforms = torch.rand(batch, DRAFTED, generator=self.generator).to(self.device)
        outputs = [
            executor.draft_from(state, anchors, heat, uniforms, rows)
            for executor, state in zip(self.both, states, strict=True)
        ]
        _equal(*outputs)


def _equal(want: DraftOutput, got: DraftOutput) -> None:
    assert torch.equal(got.tokens, want.tokens) and torch.equal(got.unrefined_tokens, want.unrefined_tokens)
    if want.candidate_ids is not None and want.q is not None and want.transition_scores is not None:
        assert got.candidate_ids is not None and torch.equal(got.candidate_ids, want.candidate_ids)
        torch.testing.assert_close(got.q, want.q, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.transition_scores, want.transition_scores, atol=1e-3, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steady_state_neither_allocates_nor_synchronises(tiny_pair: Pair, dtype: torch.dtype) -> None:
    """100 rounds of draft, append (counts known to the device only) and one readback."""
    target = open_target(tiny_pair.target, (), device="cuda")
    tables = {"embed_tokens": target.embed_tokens.to(dtype), "lm_head": target.lm_head.to(dtype)}
    executor = CudaExecutor(load_checkpoint(tiny_pair.drafter).bind(**tables))
    state, batch, rounds = executor.new_slots(8, 1024), 5, 100
    rows = [6, 0, 3, 2, 5]
    heat = torch.tensor([0.0, 0.5, 0.0, 1.0, 0.0], device="cuda")
    uniforms = torch.rand(batch, DRAFTED, device="cuda")
    anchors = torch.arange(batch, device="cuda")
    hidden = torch.randn(batch, DRAFTED + 1, WIDTH, device="cuda", dtype=dtype)
    counts = torch.full((batch,), 2, device="cuda")
    results = torch.empty(batch, DRAFTED, dtype=torch.int64, pin_memory=True)
    arrived = torch.cuda.Event()

    def one_round() -> Tensor:
        output = executor.draft_from(state, anchors, heat, uniforms, rows)
        executor.append_context(state, hidden, counts, rows)
        results.copy_(output.tokens, non_blocking=True)
        return output.tokens

    for _ in range(3):
        one_round()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(rounds):
            one_round()
            arrived.record()
            arrived.synchronize()  # the one permitted readback
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "segment.all.allocated", "allocated_bytes.all.allocated"):
        assert after[name] == before[name], name
    assert sorted(state.lengths.tolist()) == [0, 0, 0, *[2 * (rounds + 3)] * batch]


def test_ragged_batches(both: Both, device: torch.device, small_steps: None) -> None:
    """Empty contexts, appends longer than a block, a rollback, a pool that grows, sequences that leave the batch."""
    traffic = Traffic(both, device, seed=0)
    states = [executor.new_state(3) for executor in both]
    traffic.append(states, [5, 0, 2], tokens=9)
    traffic.draft(states, 3)
    traffic.append(states, [1, 4, 4], tokens=4)
    for executor, state in zip(both, states, strict=True):
        executor.truncate(state, state.lengths - torch.tensor([2, 0, 1], device=device))
    traffic.append(states, [9, 19, 3], tokens=19)
    traffic.draft(states, 3)
    states = [executor.select(state, torch.tensor([2, 1])) for executor, state in zip(both, states, strict=True)]
    traffic.append(states, [4, 1], tokens=4)
    traffic.draft(states, 2)
    assert states[1].lengths.tolist() == [12, 24] and states[1].capacity > 16


def test_slots(both: Both, device: torch.device, small_steps: None) -> None:
    traffic = Traffic(both, device, seed=1)
    with torch.inference_mode():  # what is made inside must be usable outside
        states = [executor.new_slots(5, 16) for executor in both]
        traffic.append(states, [7, 3], tokens=8, rows=[4, 1])
        traffic.draft(states, 3, rows=[1, 0, 4])
    traffic.append(states, [2, 2, 4], tokens=4, rows=[3, 4, 0])
    for executor, state in zip(both, states, strict=True):
        executor.truncate(state, torch.tensor([3]), rows=[4])
        executor.reset(state, rows=[1])
    traffic.draft(states, 4, rows=[3, 4, 1, 0])
    assert states[1].lengths.tolist() == [4, 0, 0, 2, 3]


def test_slots_return_to_the_pool(both: Both) -> None:
    """A state that nobody holds any more gives its slots back, also when only some of its sequences were selected."""
    executor = both[1]
    before = executor.new_state(2)
    slots = sorted(slot.index for slot in before.slots)
    left = executor.select(before, [1])
    del before
    again = executor.new_state(1)
    assert again.slots[0].index in slots and again.slots[0] is not left.slots[0]
    assert again.lengths.tolist() == [0]


def test_bad_arguments(both: Both) -> None:
    executor = both[1]
    state = executor.new_state(2)
    one = torch.ones(2, dtype=torch.int64)
    heat, uniforms = torch.zeros(2), torch.zeros(2, DRAFTED)
    for message, call in (
        ("wrong shape", lambda: executor.append_context(state, torch.zeros(2, 3, WIDTH + 1), one)),
        ("Counts", lambda: executor.append_context(state, torch.zeros(2, 3, WIDTH), one * 4)),
        ("Wrong shape", lambda: executor.draft_from(state, one[:1], heat, uniforms)),
        ("vocabulary", lambda: executor.draft_from(state, one * VOCABULARY, heat, uniforms)),
        ("Temperature", lambda: executor.draft_from(state, one, heat - 1, uniforms)),
        ("Wrong type", lambda: executor.draft_from(state, heat, heat, uniforms)),
        ("One length per row", lambda: executor.truncate(state, one, rows=[0])),
        ("Negative", lambda: executor.truncate(state, -one)),
        ("not rows", lambda: executor.select(state, [2])),
        ("at least one", lambda: executor.new_slots(0)),
    ):
        with pytest.raises(UsageError, match=message):
            call()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_generation_equals_the_eager_model_s(tiny_pair: Pair, temperature: float) -> None:
    """The whole loop, sequences of different lengths ending at different rounds; the pool is shared by consecutive generations."""
    target = open_target(tiny_pair.target, (0, 2), device="cuda")
    tables = target.embed_tokens, target.lm_head
    eager, kernels = (open_executor(name, tiny_pair.drafter, *tables) for name in ("eager", "torch"))
    assert isinstance(kernels, CudaExecutor)
    prompts = [[1, 2, 3], list(range(40)), [250, 7], [9] * 19, [4]]
    settings = Settings(40, temperature=temperature, eos_ids=frozenset({11}))
    want = generate_batch(target, eager, prompts, settings)
    for _ in range(2):
        got = generate_batch(target, kernels, prompts, settings)
        assert [result.token_ids for result in got] == [result.token_ids for result in want]
    assert want[0].statistics == got[0].statistics
