"""Triton kernels of rows, messages, selection and transition against references: odd sizes, ragged batches, ties, poisoned outputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_kernels.injection import gate_projections, gated_messages, gated_messages_reference
from dspine_kernels.rows import (
    embed_block,
    rms_norm,
    rms_norm_reference,
    round_rows,
    round_rows_reference,
    silu_mul,
    silu_mul_reference,
    write_and_norm,
    write_and_norm_reference,
)
from dspine_kernels.topk import SHORTLIST, rescore, shortlist, top_candidates
from dspine_kernels.topk.kernel import top_candidates_reference, workspace_keys
from dspine_kernels.transition import (
    TransitionScratch,
    fold_scores,
    lattice_walk,
    lattice_walk_reference,
    transition_scores,
    transition_scores_reference,
    walk_choices,
)

from tests.kernels.comparison import close, poisoned, randn


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_round_rows(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Plain, a row of zeros, after an addition and a norm, of a SwiGLU. The interpreter's own rounding to e4m3 loses carries."""
    rows, columns = 5, 72
    kind = torch.float8_e4m3fn if device.type == "cuda" else torch.float32
    rtol, atol = (2.0**-3, 2.0**-9) if device.type == "cuda" else (1e-5, 1e-4)
    for dtype in dtypes:
        x = randn(rows, columns, device=device, dtype=dtype)
        x *= torch.logspace(-6, 3, rows, device=device)[:, None].to(dtype)
        x[2] = 0
        out, scales = poisoned(rows, columns, device=device).to(kind), poisoned(rows, device=device)
        round_rows(x, out, scales)
        want, want_scales = round_rows_reference(x.float(), kind)
        torch.testing.assert_close(scales, want_scales)
        torch.testing.assert_close(out.float(), want.float(), rtol=rtol, atol=atol)
        update, gain = (randn(*shape, device=device, dtype=dtype) for shape in ((rows, columns), (columns,)))
        total, normed = x + update, poisoned(rows, columns, device=device, dtype=dtype)
        round_rows(x, out, scales, update=update, gain=gain, eps=1e-6, normed=normed)
        assert torch.equal(x, total)
        close(normed, rms_norm_reference(total, gain, 1e-6), dtype)
        torch.testing.assert_close(
            out.float(), round_rows_reference(normed.float(), kind)[0].float(), rtol=rtol, atol=atol
        )
        again = torch.empty_like(out)
        round_rows(total, again, scales, gain=gain, eps=1e-6)
        assert torch.equal(again.float(), out.float()), "the norm need not be kept"
        gate_up = randn(rows, 2 * columns, device=device, dtype=dtype)
        round_rows(gate_up, out, scales, silu=True)
        back, swiglu = out.float() * scales[:, None], silu_mul_reference(gate_up)
        assert float((back - swiglu).norm() / swiglu.norm()) < 0.04


@pytest.mark.parametrize(("rows", "columns"), [(7, 40), (3, 1100)])
def test_rms_norm_and_silu(rows: int, columns: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        x, gain = randn(rows, 2 * columns, device=device, dtype=dtype), randn(2 * columns, device=device, dtype=dtype)
        normed = rms_norm(x, gain, 1e-6, poisoned(rows, 2 * columns, device=device, dtype=dtype))
        close(normed, rms_norm_reference(x, gain, 1e-6), dtype)
        activated = silu_mul(x, poisoned(rows, columns, device=device, dtype=dtype))
        close(activated, silu_mul_reference(x), dtype)


def test_embed_block(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        table, gain = randn(30, 72, device=device, dtype=dtype), randn(72, device=device, dtype=dtype)
        x, normed = (poisoned(12, 72, device=device, dtype=dtype) for _ in range(2))
        anchors = torch.tensor([5, 0, 29], device=device)
        embed_block(anchors, table, 7, gain, 1e-6, 4, x, normed)
        ids = torch.tensor([[a, 7, 7, 7] for a in (5, 0, 29)], device=device).flatten()
        assert torch.equal(x, table[ids])
        close(normed, rms_norm_reference(table[ids], gain, 1e-6), dtype)


def test_write_and_norm(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        hidden, update = (randn(15, 72, device=device, dtype=dtype, scale=3.0) for _ in range(2))
        gain = randn(72, device=device, dtype=dtype)
        injected, normed = (poisoned(15, 72, device=device, dtype=dtype) for _ in range(2))
        squares = poisoned(15, device=device)
        write_and_norm(hidden, update, gain, 1e-6, 5, injected, normed, squares)
        for got, want in zip(
            (injected, normed, squares), write_and_norm_reference(hidden, update, gain, 1e-6, 5), strict=True
        ):
            close(got, want, dtype)
        assert torch.equal(injected[::5], hidden[::5])
        again, scales = (poisoned(15, 72, device=device, dtype=dtype), poisoned(15, device=device))
        rounded = poisoned(15, 72, device=device).to(torch.float8_e4m3fn if device.type == "cuda" else torch.float32)
        write_and_norm(hidden, update, gain, 1e-6, 5, injected, again, squares, rounded=(rounded, scales))
        assert torch.equal(again, normed)
        want_rounded, want_scales = round_rows_reference(normed.float(), rounded.dtype)
        torch.testing.assert_close(scales, want_scales)
        torch.testing.assert_close(
            rounded.float(), want_rounded.float(), rtol=2.0**-3 if device.type == "cuda" else 1e-5, atol=1e-4
        )


@pytest.mark.parametrize(("vocabulary", "count"), [(300, 16), (2048, 1), (4100, 33), (70, 40), (4100, 13), (20, 16)])
@pytest.mark.parametrize("word_blocks", [0, 4096], ids=["many_blocks", "few_blocks"])
def test_top_candidates(
    vocabulary: int, count: int, word_blocks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspine_kernels.topk.kernel.WORD_BLOCKS", word_blocks)
    logits = torch.randn(3, vocabulary, device=device)
    logits[1] = logits[1].round()  # ties everywhere, across the boundary too
    logits[2, ::3] = float("-inf")
    ids = torch.full((3, count), -1, dtype=torch.int64, device=device)
    keys = torch.zeros(workspace_keys(3, vocabulary), dtype=torch.int64, device=device)
    top_candidates(logits, ids, keys)
    assert torch.equal(ids, top_candidates_reference(logits, count))


@pytest.mark.parametrize("vocabulary", [20, 300, 9000])
def test_shortlist(vocabulary: int, device: torch.device) -> None:
    """Holds the sixteen largest, ids once, nothing invented; ties everywhere, few finite, NaN; keys given or found."""
    for kind in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        logits = torch.randn(8, vocabulary, device=device).to(kind)
        logits[1] = logits[1].float().round().to(kind)
        logits[2, 3:] = float("-inf")
        logits[5] = -torch.arange(vocabulary, device=device).to(kind)  # the best are neighbours
        logits[6, ::2] = float("nan")
        slots = logits.view(2, 4, -1)[:, 1:].flatten(0, 1).float()
        ids = shortlist(logits, torch.full((6, SHORTLIST), -7, device=device), 4)
        for n, (row, listed) in enumerate(zip(slots, ids, strict=True)):
            there = listed[listed >= 0]
            assert len(there) == len(there.unique())
            assert len(there) >= min(16, vocabulary) or n == 4
            assert int(there.max()) < vocabulary
            if n not in (0, 4):
                least = row.sort(descending=True).values[min(16, vocabulary) - 1]
                assert set(torch.nonzero(row > least)[:, 0].tolist()) <= set(there.tolist())
        if vocabulary == 300:
            keys = order_of_tiles(slots)
            assert torch.equal(
                shortlist(logits, torch.empty_like(ids), 4, keys)[:4].sort(1).values, ids[:4].sort(1).values
            )


def order_of_tiles(rows: torch.Tensor) -> torch.Tensor:
    """Keys as a product's epilogue leaves them, by another kernel: the best of every tile alone."""
    best = []
    for start in range(0, rows.shape[1], 128):
        found = torch.empty(len(rows), 1, dtype=torch.int64, device=rows.device)
        scratch = torch.zeros(workspace_keys(len(rows), 128), dtype=torch.int64, device=rows.device)
        best.append(top_candidates(rows[:, start : start + 128].contiguous(), found, scratch))
    ids = torch.cat([found + 128 * n for n, found in enumerate(best)], dim=1)
    bits = rows.gather(1, ids).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | (0xFFFFFFFF - ids)


def test_rescore(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """A shortlist in any order, with ties and empty places; rows of anchors are left out."""
    for dtype in dtypes:
        rows, weight = (randn(n, 40, device=device, dtype=dtype) for n in (12, 90))
        weight[7] = weight[3]
        slots = rows.view(3, 4, 40)[:, 1:].flatten(0, 1)
        listed = torch.stack([torch.randperm(90, device=device)[:11] for _ in slots])
        listed[0, :2] = torch.tensor([7, 3])
        listed[0, 2:] = torch.arange(20, 29)
        listed[1, [0, 4]], listed[2] = -1, -1
        ids = rescore(rows, weight, listed, torch.full((9, 5), -1, device=device), 4)
        ascending = listed.sort(1).values
        exact = (slots.float() @ weight.float().T).gather(1, ascending.clamp_min(0))
        exact = torch.where(ascending < 0, float("-inf"), exact)
        order = exact.sort(dim=1, descending=True, stable=True).indices[:, :5]
        listed_rows = [0, 1, *range(3, 9)]
        assert torch.equal(ids[listed_rows], ascending.gather(1, order)[listed_rows])
        assert bool(((ids[2] >= 0) & (ids[2] < 90)).all())


@pytest.mark.parametrize(("block", "rank", "m"), [(2, 24, 8), (8, 64, 40), (16, 40, 16)])
def test_gated_messages(block: int, rank: int, m: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        batch, vocabulary = 3, 50
        readout = randn(batch * block, rank, device=device, dtype=dtype, scale=3.0)
        weights, bias = randn(3 * m, rank, device=device, dtype=dtype, scale=0.1), randn(m, device=device, dtype=dtype)
        table = randn(vocabulary, 2 * m, device=device, dtype=dtype)
        anchors = torch.randint(0, vocabulary, (batch,), device=device)
        z, receiver = poisoned(batch * block, m, device=device, dtype=dtype), poisoned(batch * block, m, device=device)
        squares = readout.float().pow(2).unflatten(-1, (4, -1)).sum(-1).T.contiguous()
        gated_messages(readout, squares, weights, bias, table, anchors, z, block, receiver)
        want, want_receiver = gated_messages_reference(readout, weights, bias, table[anchors], block)
        close(z, want, dtype)
        close(receiver, want_receiver, dtype)
        projected = (readout.float() @ weights.float().T).to(dtype)
        gate_projections(
            readout, projected, bias, table, anchors, z.fill_(float("nan")), block, receiver.fill_(float("nan"))
        )
        close(z, want, dtype)
        close(receiver, want_receiver, dtype)


@pytest.mark.parametrize(
    ("block", "count", "hidden", "m"),
    [(2, 4, 40, 8), (8, 16, 136, 40), (4, 5, 264, 16), (3, 64, 40, 8), (32, 3, 24, 8)],
)
def test_transition_scores(
    block: int, count: int, hidden: int, m: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        batch, vocabulary = 2, 70
        pre = randn(batch, block, hidden, device=device, dtype=dtype, scale=2.0)
        receiver = torch.randn(batch, block, m, device=device)
        anchors = torch.randint(0, vocabulary, (batch,), device=device)
        candidates = torch.stack(
            [torch.randperm(vocabulary, device=device)[:count] for _ in range(batch * (block - 1))]
        )
        candidates = candidates.view(batch, block - 1, count).contiguous()
        weights = (
            randn(vocabulary, 2 * m, device=device, dtype=dtype),
            randn(hidden, m, device=device, dtype=dtype, scale=0.2),
            randn(hidden, device=device, dtype=dtype),
            randn(vocabulary, hidden, device=device, dtype=dtype),
        )
        table, write, gain, head = weights
        scores = poisoned(batch, block - 1, count, count, device=device)
        squares = pre.float().pow(2).unflatten(-1, (4, -1)).sum(-1).flatten(0, 1).T.contiguous()  # in four parts
        pull = (pre.float() @ write.float()).to(dtype).flatten(0, 1)
        scratch = TransitionScratch.of(batch * (block - 1), count, m, head)
        for tensor in (scratch.z, scratch.gram_z, scratch.unary, scratch.soft):
            tensor.fill_(float("nan"))
        heat, uniforms = torch.tensor([0.0, 0.8], device=device), torch.rand(batch, block - 1, device=device)
        transition_scores(
            pre.flatten(0, 1), squares, pull, receiver, anchors, candidates, table, *fold_scores(head, gain, write), gain, head, 1e-6,
            heat, uniforms, scores, scratch, block,
        )  # fmt: skip
        tokens, q = torch.full_like(candidates[..., 0], -1), poisoned(batch, block - 1, count, device=device)
        walk_choices(scratch.choices, scratch.soft, candidates, heat, tokens, q)
        want_tokens, want_q = lattice_walk_reference(scores, candidates, heat, uniforms)
        assert torch.equal(tokens, want_tokens)
        close(q, want_q, torch.float32)
        close(scores, transition_scores_reference(pre, receiver, anchors, candidates, *weights, 1e-6), dtype)


@pytest.mark.parametrize("count", [1, 5, 16])
def test_lattice_walk(count: int, device: torch.device) -> None:
    scores = torch.randn(4, 6, count, count, device=device) * 3
    scores[3] = scores[3].round()  # ties: the lowest index wins
    candidates = torch.randint(0, 1000, (4, 6, count), device=device)
    temperature, uniforms = torch.tensor([0.0, 0.7, 1.5, 0.0], device=device), torch.rand(4, 6, device=device)
    tokens = torch.full((4, 6), -1, dtype=torch.int64, device=device)
    q = poisoned(4, 6, count, device=device)
    lattice_walk(scores, candidates, temperature, uniforms, tokens, q)
    want_tokens, want_q = lattice_walk_reference(scores, candidates, temperature, uniforms)
    assert torch.equal(tokens, want_tokens)
    close(q, want_q, torch.float32)
