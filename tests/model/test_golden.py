"""The reference implementation's outputs, through the public API, in every compute dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspine_export.model.transition import unary_logits
from dspine_export.tolerance import TOLERANCES
from tests.golden_cases import CASES, assert_close, golden_drafter, golden_io

INTERMEDIATES = ("layer_outputs", "pre_injection", "hidden_states")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_exact_dtypes(case: str, dtype: torch.dtype) -> None:
    io, drafter = golden_io(case), golden_drafter(case, dtype)
    hidden = io["target_hidden"].to(dtype)
    out = drafter.draft(io["anchor_ids"], hidden, io["context_lengths"], return_intermediates=True)
    assert torch.equal(out.tokens, io["draft_tokens"])
    assert torch.equal(out.unrefined_tokens, io["unrefined_tokens"])
    assert out.candidate_ids is not None and torch.equal(out.candidate_ids, io["candidate_ids"])
    assert out.transition_scores is not None and out.transition_scores.dtype == dtype
    assert_close(out.transition_scores, io["transition_scores"])
    for name in INTERMEDIATES:
        assert getattr(out, name).dtype == dtype
        assert_close(getattr(out, name), io[name])


@pytest.mark.parametrize("case", CASES)
def test_bfloat16(case: str) -> None:
    """Choices may differ where float32 logits are closer than bfloat16 resolves; scores are compared where both ids agree."""
    io, drafter, bound = golden_io(case), golden_drafter(case, torch.bfloat16), TOLERANCES["bfloat16"]
    hidden = io["target_hidden"].bfloat16()
    out = drafter.draft(io["anchor_ids"], hidden, io["context_lengths"], return_intermediates=True)
    for name in INTERMEDIATES:
        assert_close(getattr(out, name), io[name], "bfloat16")
    assert out.candidate_ids is not None and out.transition_scores is not None
    assert out.transition_scores.dtype == torch.float32
    logits = unary_logits(io["hidden_states"][:, 1:], io["lm_head.weight"])
    gap = (logits.gather(-1, io["candidate_ids"]) - logits.gather(-1, out.candidate_ids)).abs()
    assert float(gap.max()) <= 2 * bound.absolute
    agree = out.candidate_ids == io["candidate_ids"]  # [N, B-1, K]
    assert float(agree.float().mean()) > 0.7
    before = torch.cat((torch.ones_like(agree[:, :1]), agree[:, :-1]), dim=1)
    both = before[..., :, None] & agree[..., None, :]
    assert_close(out.transition_scores[both], io["transition_scores"][both], "bfloat16")
    assert out.tokens is not None
    for row, (got, want) in enumerate(zip(out.tokens, io["draft_tokens"], strict=True)):
        parted = (got != want).nonzero().flatten().tolist()
        if parted:  # the first difference of a walk; behind it other predecessors are scored
            _undecided(io, row, parted[0], int(got[parted[0]]))


def _undecided(io: dict[str, Tensor], row: int, slot: int, token: int) -> None:
    """At that slot the float32 scores of `token` and of the golden one are one step of bfloat16 apart at most."""
    candidates, golden = io["candidate_ids"][row], io["draft_tokens"][row]
    before = 0 if slot == 0 else int((candidates[slot - 1] == golden[slot - 1]).nonzero())
    scores = io["transition_scores"][row, slot, before]
    best = float(scores[candidates[slot] == golden[slot]])
    chosen = scores[candidates[slot] == token]
    assert len(chosen), "not a golden candidate"
    assert best - float(chosen) <= abs(best) * 2**-7


def test_intermediates_only_on_request() -> None:
    io, drafter = golden_io("b4_mha_k1"), golden_drafter("b4_mha_k1")
    out = drafter.draft(io["anchor_ids"], io["target_hidden"], io["context_lengths"])
    assert all(getattr(out, name) is None for name in INTERMEDIATES)


def test_padding_rows_do_not_leak() -> None:
    """Rows beyond a sequence's length may hold anything, NaN included."""
    io, drafter = golden_io("b8_gqa"), golden_drafter("b8_gqa")
    hidden, lengths = io["target_hidden"].clone(), io["context_lengths"]
    padding = torch.arange(hidden.shape[1]) >= lengths[:, None]
    assert bool(padding.any())
    hidden[padding] = float("nan")
    out = drafter.draft(io["anchor_ids"], hidden, lengths)
    assert torch.equal(out.tokens, io["draft_tokens"])
    assert out.transition_scores is not None
    assert_close(out.transition_scores, io["transition_scores"])


def test_empty_context() -> None:
    """A sequence without committed tokens drafts the same alone, beside others, and with no context rows at all."""
    io, drafter = golden_io("b8_gqa"), golden_drafter("b8_gqa")
    lengths = io["context_lengths"].clone()
    lengths[0] = 0
    beside = drafter.draft(io["anchor_ids"], io["target_hidden"], lengths)
    alone = drafter.draft(io["anchor_ids"][:1], io["target_hidden"][:1, :0], torch.zeros(1, dtype=torch.int64))
    assert torch.equal(beside.tokens[:1], alone.tokens)
    assert beside.transition_scores is not None and alone.transition_scores is not None
    assert_close(beside.transition_scores[:1], alone.transition_scores)


def test_other_integer_types_and_lists_are_accepted() -> None:
    io, drafter = golden_io("b4_mha_k1"), golden_drafter("b4_mha_k1")
    out = drafter.draft(io["anchor_ids"].int(), io["target_hidden"], io["context_lengths"].int())
    assert torch.equal(out.tokens, io["draft_tokens"])
    out = drafter.draft(io["anchor_ids"].tolist(), io["target_hidden"], io["context_lengths"].tolist())
    assert torch.equal(out.tokens, io["draft_tokens"])
