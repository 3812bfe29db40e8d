"""Candidates and the walk through the lattice: order, ties, sampling."""

from __future__ import annotations

import pytest
import torch

from dspine_export.model.transition import predecessor_ids, select_candidates, unary_logits, walk
from tests.golden_cases import golden_drafter, golden_io, random_context, random_drafter, small_config

TOP = float(torch.nextafter(torch.tensor(1.0), torch.tensor(0.0)))  # the largest float32 below 1


def test_candidates_descend() -> None:
    logits = torch.tensor([[[0.5, 3.0, -1.0, 2.0]]])
    assert select_candidates(logits, 3).tolist() == [[[1, 3, 0]]]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_ties_go_to_the_lower_id(count: int) -> None:
    """Within the chosen ones and across the boundary."""
    logits = torch.tensor([[[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]]])
    assert select_candidates(logits, count)[0, 0].tolist() == [1, 2, 4, 0, 3, 5][:count]


def test_ties_in_a_large_vocabulary() -> None:
    """A stable sort is the oracle."""
    torch.manual_seed(0)
    logits = torch.randint(0, 40, (2, 3, 5000)).float()
    for count in (1, 7, 64):
        want = logits.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        assert torch.equal(select_candidates(logits, count), want)


def test_duplicate_head_rows() -> None:
    """Two equal rows of the head are two equal logits at every slot: the lower id comes first wherever both are chosen."""
    drafter = random_drafter(small_config(top_k=8))
    low, high = 17, 101
    drafter.lm_head[high] = drafter.lm_head[low]
    anchors, hidden, lengths = random_context(drafter, [3, 6])
    out = drafter.draft(anchors, hidden, lengths, return_intermediates=True)
    assert out.candidate_ids is not None and out.hidden_states is not None
    logits = unary_logits(out.hidden_states[:, 1:], drafter.lm_head)
    assert torch.equal(logits[..., low], logits[..., high])
    want = logits.sort(dim=-1, descending=True, stable=True).indices[..., :8]
    assert torch.equal(out.candidate_ids, want)


def test_half_precision_logits_make_no_ties() -> None:
    """Products of bfloat16 values are exact in float32, so logits that differ stay apart."""
    hidden = torch.tensor([[[1.0, 1.0]]]).bfloat16()
    head = torch.tensor([[256.0, 0.0], [256.0, 0.5]]).bfloat16()
    assert float(head[1].sum(dtype=torch.float32)) != float(head[1].sum())  # bfloat16 would round the sum
    logits = unary_logits(hidden, head)
    assert logits.dtype == torch.float32 and logits[0, 0].tolist() == [256.0, 256.5]


def test_predecessors() -> None:
    candidates = torch.arange(12).view(1, 3, 4)
    assert predecessor_ids(torch.tensor([99]), candidates).tolist() == [[[99] * 4, [0, 1, 2, 3], [4, 5, 6, 7]]]


def reference_walk(scores: torch.Tensor, ids: torch.Tensor, temperature: float, draws: list[float]) -> list[int]:
    """One sequence, written out. scores [T, K, K]"""
    index, tokens = 0, []
    for slot, u in enumerate(draws):
        row = scores[slot, index]
        if temperature == 0:
            index = int(max(range(len(row)), key=lambda j: (float(row[j]), -j)))
        else:
            cumulative = torch.softmax(row / temperature, 0).cumsum(0)
            index = next((j for j, c in enumerate(cumulative.tolist()) if c > u), len(row) - 1)
        tokens.append(int(ids[slot, index]))
    return tokens


@pytest.mark.parametrize("k", [1, 2, 5])
def test_walk_in_a_batch_of_mixed_temperatures(k: int) -> None:
    torch.manual_seed(k)
    heat = torch.tensor([0.0, 0.3, 1.0, 0.0, 2.5])
    scores = 2 * torch.randn(5, 6, k, k)
    scores[:, 0] = scores[:, 0, :1]
    ids, uniforms = torch.randint(0, 1000, (5, 6, k)), torch.rand(5, 6)
    tokens, q = walk(scores, ids, heat, uniforms)
    for n in range(5):
        assert tokens[n].tolist() == reference_walk(scores[n], ids[n], float(heat[n]), uniforms[n].tolist())
    torch.testing.assert_close(q.sum(-1), torch.ones(5, 6))
    assert set(q[heat == 0].flatten().tolist()) <= {0.0, 1.0}


def test_greedy_ties_take_the_lower_index() -> None:
    tokens, q = walk(
        torch.zeros(1, 2, 3, 3), torch.tensor([[[7, 8, 9], [4, 5, 6]]]), torch.zeros(1), torch.full((1, 2), 0.9)
    )
    assert tokens.tolist() == [[7, 4]] and q[0, 0].tolist() == [1.0, 0.0, 0.0]


def test_the_ends_of_the_uniform_range() -> None:
    """u = 0 takes the first candidate, the largest float below 1 the last, even where rounding leaves the sum below u."""
    ids = torch.arange(32).view(1, 2, 16)
    for seed in range(20):
        torch.manual_seed(seed)
        scores = 0.5 * torch.randn(1, 2, 16, 16)
        first, _ = walk(scores, ids, torch.ones(1), torch.zeros(1, 2))
        last, _ = walk(scores, ids, torch.ones(1), torch.full((1, 2), TOP))
        assert first.tolist() == [[0, 16]] and last.tolist() == [[15, 31]]


def test_a_candidate_of_no_probability_is_never_drawn() -> None:
    """exp(-200) underflows: u = 0 must not select the empty first interval."""
    scores = torch.tensor([[[[-200.0, 0.0], [-200.0, 0.0]]]])
    tokens, q = walk(scores, torch.tensor([[[5, 6]]]), torch.ones(1), torch.zeros(1, 1))
    assert tokens.tolist() == [[6]] and q[0, 0].tolist() == [0.0, 1.0]


def test_sampling_follows_q() -> None:
    """Frequencies of many draws against q, slot by slot along the drawn path."""
    torch.manual_seed(0)
    count, ids = 20000, torch.tensor([[[0, 1, 2], [0, 1, 2]]])
    one = torch.randn(1, 2, 3, 3)
    one[:, 0] = one[:, 0, :1]
    scores, heat = one.expand(count, -1, -1, -1), torch.full((count,), 0.8)
    tokens, q = walk(scores, ids.expand(count, -1, -1), heat, torch.rand(count, 2))
    want_first = torch.softmax(one[0, 0, 0] / 0.8, 0)
    joint = torch.bincount(tokens[:, 0] * 3 + tokens[:, 1], minlength=9).double()
    want = (want_first[:, None] * torch.softmax(one[0, 1] / 0.8, -1)).flatten().double() * count
    assert float(((joint - want).square() / want).sum()) < 26.1  # chi-square, 8 degrees of freedom, p = 0.001
    assert torch.equal(q[:, 1], torch.softmax(one[0, 1] / 0.8, -1)[tokens[:, 0]])


def test_generator_makes_drafts_reproducible() -> None:
    io, drafter = golden_io("b8_gqa"), golden_drafter("b8_gqa")
    arguments = io["anchor_ids"], io["target_hidden"], io["context_lengths"]
    drafts = [
        drafter.draft(*arguments, temperature=1.0, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    ]
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert not torch.equal(drafts[0].tokens, drafts[2].tokens)


def test_greedy_rows_do_not_notice_sampled_neighbours() -> None:
    io, drafter = golden_io("b8_gqa"), golden_drafter("b8_gqa")
    heat = torch.zeros(len(io["anchor_ids"]))
    heat[1:] = 1.5
    out = drafter.draft(io["anchor_ids"], io["target_hidden"], io["context_lengths"], temperature=heat)
    assert torch.equal(out.tokens[0], io["draft_tokens"][0])
    assert out.q is not None
    torch.testing.assert_close(out.q.sum(-1), torch.ones_like(out.q[..., 0]))
    assert set(out.q[0].flatten().tolist()) == {0.0, 1.0}


def test_given_uniforms_are_the_ones_used() -> None:
    io, drafter = golden_io("b8_gqa"), golden_drafter("b8_gqa")
    state = drafter.new_state(len(io["anchor_ids"]), io["target_hidden"].shape[1])
    drafter.append_context(state, io["target_hidden"], io["context_lengths"])
    shape = io["draft_tokens"].shape
    out = drafter.draft_from(state, io["anchor_ids"], temperature=0.9, uniforms=torch.zeros(shape))
    assert out.candidate_ids is not None
    assert torch.equal(out.tokens, out.candidate_ids[..., 0])
