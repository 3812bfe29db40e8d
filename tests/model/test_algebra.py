"""The exact identities an exporter and its kernels rely on, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dspine_export.model.drafter import Drafter
from dspine_export.model.drafter_model import BlockStates
from dspine_export.model.injection import inject
from dspine_export.model.mask import block_mask
from dspine_export.model.rope import rotary_tables, rotate
from dspine_export.passes.torch_ops import score_lattice
from tests.golden_cases import golden_drafter, golden_io

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module", params=["b8_gqa", "b16_qwen_ratio"])
def drafted(request: pytest.FixtureRequest) -> tuple[Drafter, BlockStates, Tensor, Tensor, Tensor]:
    """Drafter, block states, anchors, candidates and transition scores of a golden case in float64."""
    io, drafter = golden_io(request.param), golden_drafter(request.param, torch.float64)
    state = drafter.new_state(len(io["anchor_ids"]), io["target_hidden"].shape[1])
    drafter.append_context(state, io["target_hidden"].double(), io["context_lengths"])
    with torch.no_grad():
        states = drafter.model.block_states(
            io["anchor_ids"], state.keys, state.values, state.lengths, drafter.embed_tokens
        )
        scores = drafter.model.transition_scores(states, io["anchor_ids"], io["candidate_ids"], drafter.lm_head)
    return drafter, states, io["anchor_ids"], io["candidate_ids"], scores


def folded_table(drafter: Drafter) -> Tensor:
    """[M p_v ; G_p p_v] of every token. [V, 2m]"""
    injection, codes = drafter.model.injection, drafter.model.transfer_codes
    assert injection is not None and codes is not None
    feature = injection.known_feature(codes)
    return torch.cat((injection.message(feature), injection.predecessor_gate(feature)), dim=-1)


def test_token_table_folding(drafted: tuple[Drafter, BlockStates, Tensor, Tensor, Tensor]) -> None:
    drafter, states, anchors, candidates, scores = drafted
    injection = drafter.model.injection
    assert injection is not None and states.pre_feature is not None
    folded = score_lattice(
        states.pre_injection[:, 1:],
        injection.receiver_gate(states.pre_feature[:, 1:]) + injection.bias,
        anchors,
        candidates,
        folded_table(drafter),
        injection.writes[-1].weight,
        drafter.model.norm.weight,
        drafter.lm_head,
        drafter.config.rms_norm_eps,
    )
    torch.testing.assert_close(folded, scores, **EXACT)


def test_message_space_scoring(drafted: tuple[Drafter, BlockStates, Tensor, Tensor, Tensor]) -> None:
    """S without any [B-1, K, d] temporary: inner products in message space against A_j = Wr^T (gamma * W_j)."""
    drafter, states, anchors, candidates, scores = drafted
    injection, gamma, eps = drafter.model.injection, drafter.model.norm.weight, drafter.config.rms_norm_eps
    assert injection is not None and states.pre_feature is not None
    pre, write = states.pre_injection[:, 1:], injection.writes[-1].weight  # [N, T, d], [d, m]
    d, m = write.shape
    previous = torch.cat((anchors[:, None, None].expand(-1, 1, candidates.shape[-1]), candidates[:, :-1]), dim=1)
    message, gate = folded_table(drafter)[previous].split(m, dim=-1)  # [N, T, K, m]
    receiver = injection.receiver_gate(states.pre_feature[:, 1:]) + injection.bias
    z = torch.sigmoid(receiver.unsqueeze(2) + gate) * message
    heads = drafter.lm_head[candidates]  # [N, T, K, d]
    table = (gamma * heads) @ write  # A_j, [N, T, K, m]
    scale = (pre.norm(dim=-1) / math.sqrt(d))[..., None, None]
    numerator = ((gamma * pre).unsqueeze(2) @ heads.transpose(-1, -2)) + scale * (z @ table.transpose(-1, -2))
    cross = (z * (pre @ write).unsqueeze(2)).sum(-1, keepdim=True)
    square = ((z @ (write.T @ write)) * z).sum(-1, keepdim=True)
    length = pre.square().sum(-1)[..., None, None] + 2 * scale * cross + scale.square() * square
    torch.testing.assert_close(numerator / torch.sqrt(length / d + eps), scores, **EXACT)


def test_slot_one_has_one_predecessor(drafted: tuple[Drafter, BlockStates, Tensor, Tensor, Tensor]) -> None:
    scores = drafted[-1]
    torch.testing.assert_close(scores[:, 0], scores[:, 0, :1].expand_as(scores[:, 0]), rtol=0, atol=0)


def test_score_is_the_refined_state_against_the_head(
    drafted: tuple[Drafter, BlockStates, Tensor, Tensor, Tensor],
) -> None:
    """One entry written out: injection with the chosen token's code in place of the predicted feature."""
    drafter, states, _anchors, candidates, scores = drafted
    model, config = drafter.model, drafter.config
    assert model.injection is not None and model.transfer_codes is not None and config.transfer is not None
    n, slot, k, j = 0, 3, 1, 2
    r = config.transfer.rank
    p = math.sqrt(r) * model.transfer_codes[candidates[n, slot - 1, k]]
    h = states.pre_injection[n, slot + 1]
    readout = model.injection.readouts[-1].weight @ h
    phi = math.sqrt(r) * readout / readout.norm()
    g = torch.sigmoid(
        model.injection.receiver_gate.weight @ phi + model.injection.predecessor_gate.weight @ p + model.injection.bias
    )
    h = h + h.norm() / math.sqrt(h.numel()) * model.injection.writes[-1].weight @ (
        g * (model.injection.message.weight @ p)
    )
    out = h / torch.sqrt(h.square().mean() + config.rms_norm_eps) * model.norm.weight
    torch.testing.assert_close(out @ drafter.lm_head[candidates[n, slot, j]], scores[n, slot, k, j], **EXACT)


def test_injection_in_two_lines() -> None:
    """Slot i receives from slot i-1's feature, slot 1 from the anchor, slot 0 nothing."""
    torch.manual_seed(0)
    n, block, d, r, m = 2, 5, 12, 8, 6
    hidden, feature, anchor = torch.randn(n, block, d), torch.randn(n, block, r), torch.randn(n, r)
    message, receive, predecessor = (torch.randn(m, r) for _ in range(3))
    bias, write = torch.randn(m), torch.randn(d, m)
    folded = torch.cat((anchor @ message.T, anchor @ predecessor.T), dim=-1)
    got = inject(hidden, feature, folded, message, receive, predecessor, bias, write)
    assert torch.equal(got[:, 0], hidden[:, 0])
    for i in range(1, block):
        p = anchor if i == 1 else feature[:, i - 1]
        z = torch.sigmoid(feature[:, i] @ receive.T + p @ predecessor.T + bias) * (p @ message.T)
        want = hidden[:, i] + hidden[:, i].norm(dim=-1, keepdim=True) / math.sqrt(d) * (z @ write.T)
        torch.testing.assert_close(got[:, i], want)


def test_injection_of_the_shortest_block() -> None:
    """B = 2 has no slot with a predicted predecessor."""
    torch.manual_seed(0)
    weights = [torch.randn(6, 8) for _ in range(3)]
    out = inject(
        torch.randn(1, 2, 12), torch.randn(1, 2, 8), torch.randn(1, 12), *weights, torch.zeros(6), torch.randn(12, 6)
    )
    assert out.shape == (1, 2, 12) and bool(out.isfinite().all())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_mask_against_its_definition(causal: bool, window: int | None) -> None:
    lengths, capacity, block = torch.tensor([0, 2, 5]), 6, 4
    mask = block_mask(lengths, capacity, block, causal, window)
    assert mask.shape == (3, 1, block, capacity + block)
    for n, length in enumerate(lengths.tolist()):
        for slot in range(block):
            for column in range(capacity + block):
                inside = column >= capacity
                key = length + column - capacity if inside else column
                visible = (not causal or column - capacity <= slot) if inside else column < length
                visible = visible and (window is None or length + slot - key < window)
                assert bool(mask[n, 0, slot, column]) == visible, (n, slot, column)


def test_rotation_is_relative_and_keeps_lengths() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    products = []
    for shift in (0, 1000):
        tables = [rotary_tables(torch.tensor([[p + shift]]), 16, 1e4, torch.float64) for p in (3, 11)]
        a, b = rotate(x, *tables[0]), rotate(y, *tables[1])
        torch.testing.assert_close(a.norm(), x.norm())
        products.append((a * b).sum())
    torch.testing.assert_close(products[0], products[1], rtol=1e-10, atol=1e-10)


def test_rotary_frequencies_are_correctly_rounded() -> None:
    """One unit in the last place of a frequency is 2e-3 radians at the far end of a long context."""
    cos, _ = rotary_tables(torch.tensor([[1]]), 128, 1e6, torch.float32)
    exact = torch.tensor([1e6 ** -(2 * i / 128) for i in range(64)], dtype=torch.float64).float()
    assert torch.equal(cos[0, 0, 0, :64], exact.cos())


def test_normalise_survives_zero() -> None:
    from dspine_export.model.norm import normalise

    assert torch.equal(normalise(torch.zeros(3)), torch.zeros(3))
    torch.testing.assert_close(normalise(torch.full((4,), 1e-3)), F.normalize(torch.full((4,), 1e-3), dim=0))
