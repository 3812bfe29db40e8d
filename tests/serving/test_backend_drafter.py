"""The token-level model: sequences in slots, and the drafts of a drafter driven by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspine_export.errors import UsageError
from dspine_export.runtime.serving.draws import Draws
from dspine_export.runtime.serving.outcomes import OverloadedError
from dspine_export.triton.backend.drafter_inputs import DraftRequest, parse_step
from dspine_export.triton.backend.drafter_model import DrafterSteps
from dspine_export.triton.backend.sequences import SequenceTable
from tests.runtime.conftest import Opened

WIDTH = 64  # two taps of 32


def greedy() -> Draws:
    return Draws(0, 4, greedy=True)


def step(sequence: int, hidden: Tensor | None = None, anchor: int | None = None, **fields: Any) -> DraftRequest:
    whole = {"start": False, "end": False, "truncate_to": None, "temperature": 0.0, "seed": 0} | fields
    return DraftRequest(sequence, hidden=hidden, anchor=anchor, **whole)


def states(seed: int, count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def by_hand(executor: Any, hidden: Tensor, anchor: int) -> list[int]:
    state = executor.new_state(1, len(hidden))
    executor.append_context(state, hidden[None], torch.tensor([len(hidden)]))
    out = executor.draft_from(state, torch.tensor([anchor]), torch.zeros(1), torch.zeros(1, 3))
    return out.tokens[0].tolist()


def arrays(result: Any) -> dict[str, Any]:
    assert not isinstance(result, Exception), result
    return result


@pytest.mark.parametrize("kind", ["tiny", "dflash"])
def test_steps_equal_a_drafter_driven_by_hand(kind: str, request: pytest.FixtureRequest) -> None:
    """Two sequences in one batch, one of them rolled back, with different numbers of new tokens."""
    pair: Opened = request.getfixturevalue(kind)
    executor = pair[1]
    steps = DrafterSteps(executor, 3, 100, 60)
    a, b = states(1, 9), states(2, 4)
    first = steps.run([step(7, a[:6], 5, start=True), step(8, b[:1], None, start=True)])
    assert arrays(first[0])["draft_tokens"].tolist() == by_hand(executor, a[:6], 5)
    assert arrays(first[1])["draft_tokens"].tolist() == [] and arrays(first[1])["context_length"].tolist() == [1]
    second = steps.run([step(8, b[1:], 9), step(7, a[4:], 6, truncate_to=4)])
    assert arrays(second[0])["draft_tokens"].tolist() == by_hand(executor, b, 9)
    assert arrays(second[1])["draft_tokens"].tolist() == by_hand(executor, a, 6)
    assert arrays(second[1])["context_length"].tolist() == [9]
    candidates = 4 if kind == "tiny" else 1
    assert arrays(second[0])["candidate_ids"].shape == arrays(second[0])["q"].shape == (3, candidates)
    assert np.allclose(arrays(second[0])["q"].sum(-1), 1)


def test_sampled_drafts_depend_on_the_seed(tiny: Opened) -> None:
    def draft(seed: int, beside: int) -> list[list[int]]:
        steps = DrafterSteps(tiny[1], 3, 100, 60)
        crowd = [step(n, states(n, 3), 1, start=True) for n in range(2, 2 + beside)]
        ask = step(1, states(1, 5), 3, start=True, temperature=1.5, seed=seed)
        more = step(1, None, 3, temperature=1.5)
        return [arrays(steps.run(batch)[-1])["draft_tokens"].tolist() for batch in ([*crowd, ask], [more])]

    assert draft(4, 0) == draft(4, 2) and draft(4, 0) != draft(5, 0)


def test_mistakes_are_answered_one_by_one(tiny: Opened) -> None:
    steps = DrafterSteps(tiny[1], 2, 10, 60)
    results = steps.run([
        step(1, states(1, 3), 2, start=True),
        step(5, states(1, 3), 2),
        step(2, states(1, 11), 2, start=True),
        step(3, None, 2, start=True),
    ])  # fmt: skip
    assert len(arrays(results[0])["draft_tokens"]) == 3
    assert isinstance(results[1], UsageError) and "Unknown sequence" in str(results[1])
    assert isinstance(results[2], UsageError) and "too long" in str(results[2])
    assert isinstance(results[3], OverloadedError), "both slots belong to sequences of this batch"
    again = steps.run([step(1, None, 2, truncate_to=4)])
    assert isinstance(again[0], UsageError) and "truncate_to" in str(again[0])


def test_ended_sequences_leave(tiny: Opened) -> None:
    steps = DrafterSteps(tiny[1], 1, 50, 60)
    for sequence in range(3):
        hidden = states(sequence, 4)
        result = arrays(steps.run([step(sequence, hidden, 3, start=True, end=True)])[0])
        assert result["draft_tokens"].tolist() == by_hand(tiny[1], hidden, 3), "nothing is left of the one before"
    assert len(steps.table) == 0 and steps.table.evicted == 0


def test_eviction_by_age_and_by_need() -> None:
    now = [0.0]
    table = SequenceTable(2, 10, lambda: now[0])
    assert {table.start(1, greedy()).slot, table.start(2, greedy()).slot} == {0, 1}
    now[0] = 6.0
    table.find(1)
    third = table.start(3, greedy())
    assert third.slot == 1 and table.evicted == 1, "2 was idle longest"
    with pytest.raises(UsageError, match="2, never started or dropped as idle"):
        table.find(2)
    now[0] = 16.5
    table.find(3)
    table.expire()
    assert len(table) == 1 and table.evicted == 2
    table.start(4, greedy())
    with pytest.raises(OverloadedError):
        table.start(5, greedy(), busy={3, 4, 5})
    assert table.start(5, greedy(), busy={5, 3}).slot is not None
    assert table.start(3, greedy()).length == 0, "started again"


def parsed(tiny: Opened, **inputs: Any) -> DraftRequest:
    tensors = {name: value if isinstance(value, Tensor) else torch.tensor([value]) for name, value in inputs.items()}
    return parse_step(tensors.get, tiny[1].config)


def test_steps_are_validated(tiny: Opened) -> None:
    good = parsed(tiny, CORRID=7, START=True, END=False, target_hidden=states(0, 5), count=3, anchor_id=9)
    assert (good.correlation_id, good.start, good.end, good.anchor) == (7, True, False, 9)
    assert good.hidden is not None and good.hidden.shape == (3, WIDTH)
    assert parsed(tiny, CORRID=7, target_hidden=states(0, 5), count=0).hidden is None
    assert parsed(tiny, CORRID=7).anchor is None


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"anchor_id": 260}, "anchor_id"),
        ({"anchor_id": torch.tensor([1, 2])}, "anchor_id"),
        ({"target_hidden": torch.zeros(3, WIDTH - 1)}, "layers 0, 2"),
        ({"target_hidden": torch.zeros(WIDTH)}, "target_hidden"),
        ({"target_hidden": torch.zeros(3, WIDTH, dtype=torch.int64)}, "floating point"),
        ({"target_hidden": torch.full((1, WIDTH), float("nan"))}, "finite"),
        ({"target_hidden": torch.zeros(3, WIDTH), "count": 4}, "count"),
        ({"count": 2}, "count"),
        ({"truncate_to": -1}, "truncate_to"),
        ({"temperature": -1.0}, "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_steps_that_are_wrong(tiny: Opened, inputs: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        parsed(tiny, CORRID=1, **inputs)
