"""DFlash: the same backbone without injection and refinement, causal or bidirectional."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from dspine_export import load_checkpoint
from dspine_export.errors import UsageError
from dspine_export.model.drafter import Drafter
from tests.golden_cases import (
    assert_close,
    golden_drafter,
    golden_io,
    random_context,
    random_drafter,
    small_config,
    write_dflash,
)


@pytest.fixture(params=[True, False], ids=["causal", "bidirectional"])
def dflash(request: pytest.FixtureRequest, tmp_path: Path) -> Drafter:
    io = golden_io("b8_gqa")
    path = write_dflash("b8_gqa", tmp_path / "dflash", is_causal=request.param)
    return load_checkpoint(path).bind(embed_tokens=io["embed_tokens.weight"], lm_head=io["lm_head.weight"])


def test_outputs(dflash: Drafter) -> None:
    io = golden_io("b8_gqa")
    arguments = io["anchor_ids"], io["target_hidden"], io["context_lengths"]
    out = dflash.draft(*arguments, return_intermediates=True)
    assert out.tokens.shape == io["draft_tokens"].shape and torch.equal(out.tokens, out.unrefined_tokens)
    assert out.candidate_ids is None and out.transition_scores is None and out.q is None
    assert out.hidden_states is not None
    logits = out.hidden_states[:, 1:] @ io["lm_head.weight"].T
    assert torch.equal(out.tokens, logits.argmax(-1))


def test_the_mask_decides(tmp_path: Path) -> None:
    """Slot 0 sees the last slot exactly when the mask is bidirectional."""
    io = golden_io("b8_gqa")
    outputs = {}
    for causal in (True, False):
        path = write_dflash("b8_gqa", tmp_path / str(causal), is_causal=causal)
        drafter = load_checkpoint(path).bind(embed_tokens=io["embed_tokens.weight"], lm_head=io["lm_head.weight"])
        out = drafter.draft(io["anchor_ids"], io["target_hidden"], io["context_lengths"], return_intermediates=True)
        outputs[causal] = out.layer_outputs
    assert outputs[True] is not None and outputs[False] is not None
    # The causal backbone up to the first injection is DSpine's own.
    dspine = golden_drafter("b8_gqa").draft(
        io["anchor_ids"], io["target_hidden"], io["context_lengths"], return_intermediates=True
    )
    assert dspine.layer_outputs is not None
    assert_close(outputs[True][:, 0, 0], dspine.layer_outputs[:, 0, 0])  # slot 0 is never written
    assert float((outputs[False][:, 0, 0] - dspine.layer_outputs[:, 0, 0]).abs().max()) > 1e-2


def test_sampling_is_refused(dflash: Drafter) -> None:
    io = golden_io("b8_gqa")
    with pytest.raises(UsageError, match="no transition cache"):
        dflash.draft(io["anchor_ids"], io["target_hidden"], io["context_lengths"], temperature=0.7)


def test_silent_injection_is_dflash() -> None:
    """With the write matrices at zero, injection and refinement vanish: layers, scores and tokens are the plain backbone's."""
    config = small_config(block_size=6)
    dspine = random_drafter(config)
    assert dspine.model.injection is not None
    for write in dspine.model.injection.writes:
        write.weight.zero_()
    plain = random_drafter(small_config(block_size=6))
    plain.model.load_state_dict(dspine.model.state_dict())
    plain.model.injection = None
    anchors, hidden, lengths = random_context(dspine, [5, 0, 3])
    out = dspine.draft(anchors, hidden, lengths, return_intermediates=True)
    states = plain.model.block_states(anchors, *_cache(plain, hidden, lengths), lengths, plain.embed_tokens)
    assert out.hidden_states is not None and out.transition_scores is not None and out.candidate_ids is not None
    assert_close(out.hidden_states, states.hidden)
    unary = F.linear(states.hidden[:, 1:], plain.lm_head).gather(-1, out.candidate_ids)
    assert_close(out.transition_scores, unary.unsqueeze(2).expand_as(out.transition_scores))
    assert torch.equal(out.tokens, out.unrefined_tokens)


def _cache(drafter: Drafter, hidden: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    state = drafter.new_state(hidden.shape[0], hidden.shape[1])
    drafter.append_context(state, hidden, lengths)
    return state.keys, state.values
