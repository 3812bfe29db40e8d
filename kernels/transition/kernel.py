"""Transition scores: messages of all candidate predecessors, the vendor's product with the write weight, then chunks of the hidden
dimension reduced to K x K partial products and K partial squares. Sums over chunks are deterministic: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 256
PIECE = 128


@triton.jit
def _candidate_messages(
    receiver_gate, anchor_ids, candidate_ids, table, z, m, count, block, K2: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    slots = block - 1
    n, slot = row // slots, row % slots
    rk = tl.arange(0, K2)
    k_ok, m_ok = rk < count, rm < m
    anchor = tl.load(anchor_ids + n).to(tl.int64)
    before = tl.load(candidate_ids + tl.maximum(row - 1, 0) * count + rk, mask=k_ok, other=0).to(tl.int64)
    before = tl.where(slot > 0, before, anchor)
    at = table + before[:, None] * (2 * m) + rm[None, :]
    ok = k_ok[:, None] & m_ok[None, :]
    message = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(at + m, mask=ok, other=0.0).to(tl.float32)
    state = n * block + slot + 1
    gate += tl.load(receiver_gate + state * m + rm, mask=m_ok, other=0.0)[None, :]
    to = z + (row * count + rk)[:, None].to(tl.int64) * m + rm[None, :]
    tl.store(to, (tl.sigmoid(gate) * message).to(z.dtype.element_ty), mask=ok)


@triton.jit
def _partials(
    pre, squares_in, update, candidate_ids, norm_weight, lm_head, partial, hidden, count, block, chunks,
    K2: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0), tl.program_id(1)
    slots = block - 1
    state = row // slots * block + row % slots + 1
    rk = tl.arange(0, K2)
    k_ok = rk < count
    own = tl.load(candidate_ids + row * count + rk, mask=k_ok, other=0).to(tl.int64)
    scale = tl.sqrt(tl.load(squares_in + state) / hidden)
    products = tl.zeros((K2, K2), tl.float32)
    squares = tl.zeros((K2,), tl.float32)
    for start in range(0, CHUNK, PIECE):
        rd = chunk * CHUNK + start + tl.arange(0, PIECE)
        d_ok = rd < hidden
        ok = k_ok[:, None] & d_ok[None, :]
        base = tl.load(pre + state.to(tl.int64) * hidden + rd, mask=d_ok, other=0.0).to(tl.float32)
        change = tl.load(update + (row * count + rk)[:, None].to(tl.int64) * hidden + rd[None, :], mask=ok, other=0.0)
        refined = base[None, :] + scale * change.to(tl.float32)
        squares += tl.sum(tl.where(d_ok[None, :], refined * refined, 0.0), 1)
        gamma = tl.load(norm_weight + rd, mask=d_ok, other=0.0).to(tl.float32)
        heads = tl.load(lm_head + own[:, None] * hidden + rd[None, :], mask=ok, other=0.0).to(tl.float32)
        products = tl.dot(refined * gamma[None, :], tl.trans(heads), products, input_precision=PRECISION)
    at = partial + (row * chunks + chunk).to(tl.int64) * K2 * (K2 + 1)
    tl.store(at + rk[:, None] * K2 + rk[None, :], products)
    tl.store(at + K2 * K2 + rk, squares)


@triton.jit
def _reduce(partial, scores, hidden, eps, count, chunks, K2: tl.constexpr):
    row = tl.program_id(0)
    rk = tl.arange(0, K2)
    products = tl.zeros((K2, K2), tl.float32)
    squares = tl.zeros((K2,), tl.float32)
    for chunk in range(chunks):
        at = partial + (row * chunks + chunk).to(tl.int64) * K2 * (K2 + 1)
        products += tl.load(at + rk[:, None] * K2 + rk[None, :])
        squares += tl.load(at + K2 * K2 + rk)
    result = products * tl.rsqrt(squares / hidden + eps)[:, None]
    ok = (rk < count)[:, None] & (rk < count)[None, :]
    tl.store(scores + row.to(tl.int64) * count * count + rk[:, None] * count + rk[None, :], result, mask=ok)


@triton.jit
def _walk(scores, candidate_ids, temperature, uniforms, tokens, q, slots, count, K2: tl.constexpr):
    n = tl.program_id(0)
    rk = tl.arange(0, K2)
    ok = rk < count
    heat = tl.load(temperature + n)
    sampled = heat > 0
    divisor = tl.where(sampled, heat, 1.0)
    index = tl.full((), 0, tl.int32)
    for slot in range(slots):
        row = n * slots + slot
        values = tl.load(scores + (row * count + index).to(tl.int64) * count + rk, mask=ok, other=float("-inf"))
        peak = tl.max(values, 0)
        greedy = tl.min(tl.where(values == peak, rk, K2 - 1), 0)
        soft = tl.where(ok, tl.exp((values - peak) / divisor), 0.0)
        soft = soft / tl.sum(soft, 0)
        u = tl.load(uniforms + row)
        drawn = tl.sum(tl.where(ok & (tl.cumsum(soft, 0) <= u), 1, 0), 0)
        index = tl.minimum(tl.where(sampled, drawn, greedy), count - 1)
        tl.store(tokens + row, tl.load(candidate_ids + row * count + index))
        tl.store(q + row * count + rk, tl.where(sampled, soft, tl.where(rk == index, 1.0, 0.0)), mask=ok)


def partial_size(rows: int, hidden: int, count: int) -> int:
    """float32 scratch elements of `transition_scores` for N*(B-1) rows."""
    k2 = max(16, triton.next_power_of_2(count))
    return rows * triton.cdiv(hidden, CHUNK) * k2 * (k2 + 1)


def transition_scores(
    pre: Tensor, squares: Tensor, receiver_gate: Tensor, anchor_ids: Tensor, candidate_ids: Tensor, token_table: Tensor,
    write_weight: Tensor, norm_weight: Tensor, lm_head: Tensor, eps: float,
    scores: Tensor, z: Tensor, update: Tensor, partial: Tensor, block: int,
) -> Tensor:  # fmt: skip
    """Scores of every (predecessor, successor) pair of adjacent candidates.

    Args:
        pre: [N*B, d] last layer before its injection; squares: float32 [N*B] of its |row|^2.
        receiver_gate: float32 [N*B, m], G_r phi_L(pre) + b.
        candidate_ids: int64 [N, B-1, K]; ids must lie in the vocabulary.
        scores: float32 [N, B-1, K, K], written.
        z [N*(B-1)*K, m], update [N*(B-1)*K, d], partial (float32, see `partial_size`): scratch.

    Returns:
        scores.
    """
    hidden, m = write_weight.shape
    batch, slots, count = candidate_ids.shape
    rows, k2, chunks = batch * slots, max(16, triton.next_power_of_2(count)), triton.cdiv(hidden, CHUNK)
    _candidate_messages[(rows, triton.cdiv(m, 128))](
        receiver_gate, anchor_ids, candidate_ids, token_table, z, m, count, block, K2=k2, BM=128, num_warps=4
    )  # fmt: skip
    torch.mm(z, write_weight.T, out=update)
    _partials[(rows, chunks)](
        pre, squares, update, candidate_ids, norm_weight, lm_head, partial, hidden, count, block, chunks,
        K2=k2, CHUNK=CHUNK, PIECE=PIECE, PRECISION="ieee" if write_weight.element_size() == 4 else "tf32x3", num_warps=4, num_stages=2,
    )  # fmt: skip
    _reduce[(rows,)](partial, scores, hidden, eps, count, chunks, K2=k2, num_warps=4)
    return scores


def lattice_walk(
    scores: Tensor, candidate_ids: Tensor, temperature: Tensor, uniforms: Tensor, tokens: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """Greedy (temperature 0) or sampled walk, one program per sequence; shapes as in the operator ``dspine::lattice_walk``."""
    batch, slots, count = candidate_ids.shape
    k2 = triton.next_power_of_2(max(2, count))
    _walk[(batch,)](scores, candidate_ids, temperature, uniforms, tokens, q, slots, count, K2=k2, num_warps=1)
    return tokens, q
