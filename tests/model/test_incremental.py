"""The context cache: any way of committing tokens gives the result of committing them at once."""

from __future__ import annotations

import pytest
import torch

from dspine_export.model.drafter import Drafter
from dspine_export.model.output import DraftOutput
from dspine_export.model.state import DraftState
from tests.golden_cases import CASES, assert_close, golden_drafter, golden_io


def append_in_pieces(drafter: Drafter, state: DraftState, hidden: torch.Tensor, pieces: list[list[int]]) -> None:
    """Ragged pieces: row p of `pieces` says how many rows each sequence commits in step p."""
    start = torch.zeros(hidden.shape[0], dtype=torch.int64)
    for counts in pieces:
        width = max(*counts, 1)
        chunk = torch.full((hidden.shape[0], width, hidden.shape[2]), float("nan"), dtype=hidden.dtype)
        for n, count in enumerate(counts):
            chunk[n, :count] = hidden[n, int(start[n]) : int(start[n]) + count]
        drafter.append_context(state, chunk, torch.tensor(counts))
        start += torch.tensor(counts)


def ragged_pieces(lengths: torch.Tensor, steps: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    borders = [
        [*sorted(torch.randint(0, int(n) + 1, (steps - 1,), generator=generator).tolist()), int(n)] for n in lengths
    ]
    return [[b[p] - (b[p - 1] if p else 0) for b in borders] for p in range(steps)]


def assert_golden(out: DraftOutput, case: str) -> None:
    io = golden_io(case)
    assert torch.equal(out.tokens, io["draft_tokens"])
    assert out.candidate_ids is not None and torch.equal(out.candidate_ids, io["candidate_ids"])
    assert out.transition_scores is not None
    assert_close(out.transition_scores, io["transition_scores"])


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("case", CASES)
def test_ragged_pieces(case: str, steps: int) -> None:
    io, drafter = golden_io(case), golden_drafter(case)
    lengths = io["context_lengths"]
    state = drafter.new_state(len(lengths), int(lengths.max()) + 9)  # spare capacity must not matter
    append_in_pieces(drafter, state, io["target_hidden"], ragged_pieces(lengths, steps, seed=steps))
    assert torch.equal(state.lengths, lengths)
    assert_golden(drafter.draft_from(state, io["anchor_ids"]), case)


def test_drafting_leaves_the_cache_alone() -> None:
    io, drafter = golden_io("b8_gqa"), golden_drafter("b8_gqa")
    state = drafter.new_state(len(io["anchor_ids"]), io["target_hidden"].shape[1])
    drafter.append_context(state, io["target_hidden"], io["context_lengths"])
    keys, values = state.keys.clone(), state.values.clone()
    drafter.draft_from(state, io["anchor_ids"])
    assert torch.equal(keys, state.keys) and torch.equal(values, state.values)
    assert_golden(drafter.draft_from(state, io["anchor_ids"]), "b8_gqa")


def test_truncate_and_append_again() -> None:
    """Rows of a rejected continuation are overwritten, not remembered."""
    io, drafter = golden_io("b8_gqa"), golden_drafter("b8_gqa")
    lengths, hidden = io["context_lengths"], io["target_hidden"]
    state = drafter.new_state(len(lengths), int(lengths.max()) + 4)
    drafter.append_context(state, hidden, lengths)
    drafter.append_context(state, torch.randn_like(hidden[:, :4]), torch.full_like(lengths, 4))
    kept = lengths // 2
    drafter.truncate(state, kept)
    rest = lengths - kept
    tail = torch.zeros(len(lengths), int(rest.max()), hidden.shape[2])
    for n in range(len(lengths)):
        tail[n, : int(rest[n])] = hidden[n, int(kept[n]) : int(lengths[n])]
    drafter.append_context(state, tail, rest)
    assert_golden(drafter.draft_from(state, io["anchor_ids"]), "b8_gqa")


def test_truncate_to_nothing_equals_a_new_state() -> None:
    io, drafter = golden_io("b8_gqa"), golden_drafter("b8_gqa")
    lengths = io["context_lengths"]
    state = drafter.new_state(len(lengths), int(lengths.max()))
    empty = drafter.draft_from(state, io["anchor_ids"])
    drafter.append_context(state, io["target_hidden"], lengths)
    drafter.truncate(state, torch.zeros_like(lengths))
    again = drafter.draft_from(state, io["anchor_ids"])
    assert torch.equal(empty.tokens, again.tokens)
    assert empty.transition_scores is not None and again.transition_scores is not None
    assert torch.equal(empty.transition_scores, again.transition_scores)


def test_the_callers_lengths_are_copied() -> None:
    drafter = golden_drafter("b8_gqa")
    state = drafter.new_state(1, 8)
    drafter.append_context(state, golden_io("b8_gqa")["target_hidden"][:1, :4], torch.tensor([4]))
    lengths = torch.tensor([2])
    drafter.truncate(state, lengths)
    lengths[0] = 7
    assert state.lengths.tolist() == [2]
