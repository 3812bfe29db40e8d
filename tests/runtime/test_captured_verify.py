"""Captured verification against the plain one: on a GPU with graphs, elsewhere the same passes without them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dspine_export.errors import DspineWarning
from dspine_export.runtime.captured_verify import FEWEST_COLUMNS, MOST_TOKENS, PROMPTS, Shape, shape_for
from dspine_export.runtime.generate import generate, generate_batch
from dspine_export.runtime.generation import Settings
from dspine_export.runtime.load_target import open_target
from dspine_export.runtime.open_executor import open_executor
from dspine_export.runtime.target import TargetExecutor, TargetStep
from tests.runtime.pairs import Pair

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]),
]  # fmt: skip
Both = tuple[TargetExecutor, TargetExecutor]


@pytest.fixture(scope="module", params=DEVICES)
def opened(request: pytest.FixtureRequest, tiny_pair: Pair) -> Both:
    """Without captured passes, and with them."""
    plain, captured = (
        open_target(tiny_pair.target, (0, 2), device=request.param, capture=capture) for capture in (False, True)
    )
    return plain, captured


@pytest.fixture
def both(opened: Both) -> Iterator[Both]:
    """The two targets; the second must not have given up capturing, which the results would not show."""
    yield opened
    assert opened[1].captured


@pytest.mark.parametrize(
    ("sequences", "tokens", "longest", "want"),
    [
        (1, 1, 0, Shape(1, 1, FEWEST_COLUMNS)),
        (3, 7, 248, Shape(4, 8, 256)),
        (3, 8, 249, Shape(4, 8, 512)),
        (33, 16, 900, Shape(48, 16, 1000)),
        (1, 16, 985, None),
        (1, 15, 984, Shape(1, 16, 1000)),
        (1, 15, 985, None),
        (1, MOST_TOKENS, 0, Shape(1, MOST_TOKENS, FEWEST_COLUMNS)),
        (1, MOST_TOKENS + 1, 0, None),
    ],
)
def test_shapes(sequences: int, tokens: int, longest: int, want: Shape | None) -> None:
    assert shape_for(sequences, tokens, longest, 1000) == want


def test_sizes() -> None:
    assert shape_for(2, 300, 100, 1000, PROMPTS) == Shape(2, 512, 1000)
    assert shape_for(3, 300, 100, 1000, PROMPTS) is None, "too many rows"
    assert shape_for(1, 513, 100, 2000, PROMPTS) is None


def equal(got: TargetStep, want: TargetStep) -> None:
    torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.hidden, want.hidden, atol=1e-4, rtol=1e-4)


def test_ragged_blocks(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of several widths, partly committed, over several numbers of columns; sequences leave, out of order."""
    monkeypatch.setattr("dspine_export.runtime.captured_verify.FEWEST_COLUMNS", 16)
    generator = torch.Generator().manual_seed(0)
    prompts = [[3, 1, 4, 1, 5, 9], [200], [7] * 19]
    states = [target.new_state(3, 64) for target in both]
    for target, state in zip(both, states, strict=True):
        target.prefill(state, prompts, lambda _hidden, _counts: None)
    for width, kept in ((4, [4, 0, 2]), (1, [1, 1, 1]), (3, [1, 2, 3]), (8, [8, 1, 0])):
        block = torch.randint(0, 256, (3, width), generator=generator).to(both[0].device)
        for state in states:
            state.longest = int(state.lengths.max())
        steps = [target.verify(state, block) for target, state in zip(both, states, strict=True)]
        equal(steps[1], steps[0])
        for target, state in zip(both, states, strict=True):
            target.commit(state, torch.tensor(kept, device=block.device))
    rows = torch.tensor([2, 0], device=both[0].device)
    states = [target.select(state, rows) for target, state in zip(both, states, strict=True)]
    block = torch.randint(0, 256, (2, 4), generator=generator).to(both[0].device)
    steps = [target.verify(state, block) for target, state in zip(both, states, strict=True)]
    equal(steps[1], steps[0])
    eager = both[1]._forward(states[1], block)  # what a pass that was not captured reads of these slots
    torch.testing.assert_close(eager[0], steps[0].logits, atol=1e-4, rtol=1e-4)
    assert both[1]._graphs is not None and both[1]._graphs._passes[states[1].storage].by_shape  # type: ignore[index]


def test_slots(both: Both) -> None:
    """Any slots in any order; a slot that is emptied and taken again; the others keep what they hold."""
    generator = torch.Generator().manual_seed(1)
    caches = [target.new_slots(5, 48) for target in both]

    def step(rows: list[int], width: int, kept: list[int]) -> None:
        block = torch.randint(0, 256, (len(rows), width), generator=generator).to(both[0].device)
        steps = [target.verify(cache.view(rows), block) for target, cache in zip(both, caches, strict=True)]
        equal(steps[1], steps[0])
        for cache in caches:
            cache.advance(rows, kept)

    step([0, 1, 2, 3, 4], 6, [6, 1, 3, 5, 2])
    step([3, 1], 4, [4, 0])
    step([4, 0, 2], 4, [1, 2, 3])
    for cache in caches:
        cache.reset(3, erase=True)
    step([3], 1, [1])
    step([1, 2, 3], 4, [1, 1, 1])
    assert caches[0].lengths == caches[1].lengths and caches[1].spare == 5


def test_pieces_of_prompts(both: Both) -> None:
    """Padded in length and in number, one behind another, blocks between them."""
    generator = torch.Generator().manual_seed(2)
    caches = [target.new_slots(4, 200) for target in both]
    for rows, width, kept in (
        ([0, 2, 1], 64, [64, 50, 33]),
        ([2, 0], 40, [40, 7]),
        ([3], 130, [130]),
        ([1, 3], 4, [3, 4]),
    ):
        ids = torch.randint(0, 256, (len(rows), width), generator=generator).to(both[0].device)
        views = [cache.view(rows) for cache in caches]
        if width > MOST_TOKENS:
            want, got = (target.read(view, ids) for target, view in zip(both, views, strict=True))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        else:
            equal(*(target.verify(view, ids) for target, view in zip(both[::-1], views[::-1], strict=True)))
        for cache in caches:
            cache.advance(rows, kept)
    graphs = both[1]._prompt_graphs
    assert graphs is not None and not graphs.broken
    assert sorted((s.sequences, s.tokens) for s in graphs._passes[caches[1]].by_shape) == [(1, 256), (2, 64), (4, 64)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generation(both: Both, tiny_pair: Pair, temperature: float) -> None:
    """The whole loop: speculative and plain, twice over the cache that is kept between generations."""
    plain, captured = both
    executor = open_executor("eager", tiny_pair.drafter, plain.embed_tokens, plain.lm_head)
    prompts = [[1, 2, 3], list(range(40)), [250, 7], [9] * 19, [4]]
    settings = Settings(40, temperature=temperature, eos_ids=frozenset({11}))
    for drafter in (executor, None):
        want = [result.token_ids for result in generate_batch(plain, drafter, prompts, settings)]
        caches = set()
        for _ in range(2):
            assert [result.token_ids for result in generate_batch(captured, drafter, prompts, settings)] == want
            gc.collect()
            caches.add(id(captured._kept))
        assert len(caches) == 1
    ids = generate(captured, executor, [5, 6], max_new_tokens=30).token_ids
    assert ids == generate(captured, None, [5, 6], max_new_tokens=30).token_ids


def test_a_cache_in_use_is_not_handed_out(both: Both) -> None:
    first = both[1].new_state(2, 20)
    kept = both[1].select(first, torch.tensor([1], device=both[1].device))
    del first
    second = both[1].new_state(2, 20)
    assert second.storage is not kept.storage
    storage = second.storage
    del second, kept
    assert both[1].new_state(2, 20).storage is storage


def test_a_longer_generation_replaces_cache_and_passes(both: Both) -> None:
    """The old cache's memory is free at once, and passes are captured over the new one."""
    ids = [generate(both[1], None, [5, 6, 7], max_new_tokens=count).token_ids for count in (20, 90)]
    assert ids[1][:20] == ids[0]
    state = both[1].new_state(2, 20)
    both[1].verify(state, torch.tensor([[1, 2], [3, 4]], device=both[1].device))
    old = weakref.ref(state.keys[0])
    del state
    gc.disable()
    try:
        state = both[1].new_state(2, 500)
        assert old() is None
    finally:
        gc.enable()
    both[1].verify(state, torch.tensor([[1, 2], [3, 4]], device=both[1].device))


def test_what_cannot_be_captured(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and the plain pass from then on."""
    target = open_target(tiny_pair.target, (0,), capture=True)

    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand so on")

    monkeypatch.setattr("dspine_export.runtime.captured_verify.CapturedPass", fail)
    with pytest.warns(DspineWarning, match=r"launch by launch.*not permitted when stream is capturing$") as caught:
        ids = generate(target, None, [5, 6], max_new_tokens=5).token_ids
    assert len(caught) == 1
    assert ids == generate(open_target(tiny_pair.target, (0,)), None, [5, 6], max_new_tokens=5).token_ids
