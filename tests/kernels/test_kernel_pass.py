"""The whole pass of kernels against the eager model on the golden cases: tokens and candidates equal, scores within tolerance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_kernels.dependent import DEFAULT_START, LATE, STARTS
from dspine_kernels.transition.kernel import GRAM_PLAN

from dspine_export import load_checkpoint
from dspine_export.model.drafter import Drafter
from dspine_export.runtime.injection_form import Form
from dspine_export.runtime.kernel_pass import CacheView, ContextPass, DraftPass
from dspine_export.runtime.packed_weights import pack
from dspine_export.runtime.vendor_layer import VendorLayers
from dspine_export.tolerance import TOLERANCES
from tests.golden_cases import golden_drafter, golden_io
from tests.kernels.comparison import close

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("form", ["plain", "folded", "merged"])
@pytest.mark.parametrize("fused", [True, False], ids=["our_products", "vendor_products"])
@pytest.mark.parametrize("case", ["b4_mha_k1", "b8_gqa", "b16_qwen_ratio"])
def test_pass_equals_golden(case: str, fused: bool, form: Form, device: torch.device) -> None:
    if case == "b16_qwen_ratio" and device.type == "cpu":
        pytest.skip("takes minutes under Triton's interpreter; runs on a GPU")
    io = {name: tensor.to(device) for name, tensor in load_file(GOLDEN / case / "io.safetensors").items()}
    checkpoint = load_checkpoint(GOLDEN / case / "drafter")
    drafter = checkpoint.bind(embed_tokens=io["embed_tokens.weight"], lm_head=io["lm_head.weight"])
    weights = pack(drafter, max_positions=128, folded=form == "folded", merged=form == "merged")
    batch, tokens = io["target_hidden"].shape[:2]
    state = drafter.new_state(batch, 64)
    cache = CacheView(state.keys, state.values, state.lengths)
    append = ContextPass(drafter.config, weights, cache, tokens)
    append.target_hidden.copy_(io["target_hidden"])
    append.counts.copy_(io["context_lengths"])
    append.launch()
    assert torch.equal(cache.lengths, io["context_lengths"])
    draft = DraftPass(drafter.config, weights, cache, fused=fused, form=form)
    draft.anchor_ids.copy_(io["anchor_ids"])
    draft.launch()
    assert torch.equal(draft.tokens, io["draft_tokens"])
    assert torch.equal(draft.candidate_ids.view_as(io["candidate_ids"]), io["candidate_ids"])
    bound = TOLERANCES["float32"]
    torch.testing.assert_close(draft.scores, io["transition_scores"], atol=bound.absolute, rtol=bound.relative)


def test_any_subset_of_slots(device: torch.device) -> None:
    """Sequences in a larger cache, in another order: the same tokens, and lengths advanced at their own slots only."""
    io = {name: tensor.to(device) for name, tensor in load_file(GOLDEN / "b4_mha_k1" / "io.safetensors").items()}
    checkpoint = load_checkpoint(GOLDEN / "b4_mha_k1" / "drafter")
    drafter = checkpoint.bind(embed_tokens=io["embed_tokens.weight"], lm_head=io["lm_head.weight"])
    weights = pack(drafter, max_positions=128)
    batch, tokens = io["target_hidden"].shape[:2]
    state = drafter.new_state(batch + 3, 64)
    cache = CacheView(state.keys, state.values, state.lengths)
    slots = torch.arange(batch, device=device).flip(0) + 2
    append = ContextPass(drafter.config, weights, cache, tokens, batch=batch)
    append.target_hidden.copy_(io["target_hidden"])
    append.counts.copy_(io["context_lengths"])
    append.slots.copy_(slots)
    append.launch()
    lengths = torch.zeros(batch + 3, dtype=torch.int64, device=device)
    lengths[slots] = io["context_lengths"]
    assert torch.equal(cache.lengths, lengths)
    draft = DraftPass(drafter.config, weights, cache, batch=batch)
    draft.anchor_ids.copy_(io["anchor_ids"])
    draft.slots.copy_(slots)
    draft.launch()
    assert torch.equal(draft.tokens, io["draft_tokens"])


def test_last_write_in_one_product(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows as by a product and a norm, but for a factor by row, which orders nothing."""
    io, drafter = golden_io("b8_gqa"), golden_drafter("b8_gqa")
    drafter = Drafter(drafter.model.to(device), drafter.embed_tokens.to(device), drafter.lm_head.to(device))
    weights = pack(drafter, max_positions=64, folded=True)
    batch = len(io["anchor_ids"])
    state = drafter.new_state(batch, 16)
    cache = CacheView(state.keys, state.values, state.lengths)

    def written() -> DraftPass:
        draft = DraftPass(drafter.config, weights, cache, fused=False, form="folded")
        draft.anchor_ids.copy_(io["anchor_ids"])
        for step in draft.steps:
            if step.stage == "lm_head":
                return draft
            step.run()
        raise AssertionError("no head")

    two = written()
    monkeypatch.setattr(VendorLayers, "_writes_at_once", lambda _layers: True)
    one = written()
    stages = [[step.stage for step in draft.steps] for draft in (one, two)]
    assert stages[1].count("write_norm") == 1 + stages[0].count("write_norm")
    close(one.squares, two.squares, torch.float32)
    close(one.written, two.written, torch.float32)
    got, want = (draft.normed.float() / draft.normed.float().norm(dim=1, keepdim=True) for draft in (one, two))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_kernels_that_are_read_past_before_their_end_start_the_next_one_late() -> None:
    """`_candidate_messages` and `_scores` read what is older than these, which holds only behind a late start."""
    starts = {STARTS.get(name, DEFAULT_START) for name in ("select_by_word", "_select", "_rescore")}
    assert starts == {LATE} and GRAM_PLAN.start == LATE
