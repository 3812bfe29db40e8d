"""Transition scores in message space: no [B-1, K, d] temporaries.

With z the gated message of a candidate predecessor, A_j = Wr^T (gamma * W_j) folded into a table and G = Wr^T Wr,

    S = (<gamma * pre, W_j> + s <z, A_j>) / sqrt((|pre|^2 + 2 s <Wr^T pre, z> + s^2 <z, G z>) / d + eps),    s = |pre| / sqrt(d)

so a slot reads K rows of the head once, for its own state, and K rows of width m for all its predecessors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_next, wait_previous
from torch import Tensor


@triton.jit
def _candidate_messages(
    receiver_gate, anchor_ids, candidate_ids, table, z, m, count, block, K2: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    start_next(PDL)
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    slots = block - 1
    n, slot = row // slots, row % slots
    rk = tl.arange(0, K2)
    k_ok, m_ok = rk < count, rm < m
    wait_previous(PDL)
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
def _scores(
    pre, squares_in, pull, candidate_ids, z, gram_z, score_table, norm_weight, lm_head, scores,
    rows, tiles, hidden, pull_stride, m, count, block, eps,
    K2: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, TILES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start_next(PDL)
    slots = block - 1
    state = row // slots * block + row % slots + 1
    rk, rm, rd, tile = tl.arange(0, K2), tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, TILES)
    k_ok = rk < count
    wait_previous(PDL)
    own = tl.load(candidate_ids + row * count + rk, mask=k_ok, other=0).to(tl.int64)
    squares = tl.sum(tl.load(squares_in + tile * rows + state, mask=tile < tiles, other=0.0), 0)
    unary = tl.zeros((K2,), tl.float32)
    for start in range(0, hidden, BD):
        d = start + rd
        d_ok = d < hidden
        gain = tl.load(norm_weight + d, mask=d_ok, other=0.0).to(tl.float32)
        base = tl.load(pre + state.to(tl.int64) * hidden + d, mask=d_ok, other=0.0).to(tl.float32) * gain
        heads = tl.load(lm_head + own[:, None] * hidden + d[None, :], mask=k_ok[:, None] & d_ok[None, :], other=0.0)
        unary += tl.sum(heads.to(tl.float32) * base[None, :], 1)
    products = tl.zeros((K2, K2), tl.float32)
    linear, quadratic = tl.zeros((K2,), tl.float32), tl.zeros((K2,), tl.float32)
    pair = (row * count + rk)[:, None].to(tl.int64) * m
    for start in range(0, m, BM):
        at = start + rm
        ok = k_ok[:, None] & (at < m)[None, :]
        message = tl.load(z + pair + at[None, :], mask=ok, other=0.0)
        table = tl.load(score_table + own[:, None] * m + at[None, :], mask=ok, other=0.0)
        products = tl.dot(message, tl.trans(table), products, input_precision=PRECISION)
        message = message.to(tl.float32)
        back = tl.load(pull + state.to(tl.int64) * pull_stride + at, mask=at < m, other=0.0).to(tl.float32)
        linear += tl.sum(message * back[None, :], 1)
        quadratic += tl.sum(message * tl.load(gram_z + pair + at[None, :], mask=ok, other=0.0).to(tl.float32), 1)
    scale = tl.sqrt(squares / hidden)
    refined = tl.maximum(squares + scale * (2.0 * linear + scale * quadratic), 0.0)
    result = (unary[None, :] + scale * products) * tl.rsqrt(refined / hidden + eps)[:, None]
    to = scores + row.to(tl.int64) * count * count + rk[:, None] * count + rk[None, :]
    tl.store(to, result, mask=k_ok[:, None] & k_ok[None, :])


def fold_scores(lm_head: Tensor, norm_weight: Tensor, write_weight: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of message space: A [V, m] = (gamma * W) Wr and G [m, m] = Wr^T Wr; products in float32, stored as the weights are."""
    write, gain = write_weight.float(), norm_weight.float()
    table = lm_head.new_empty(lm_head.shape[0], write.shape[1])
    for to, rows in zip(table.split(16384), lm_head.split(16384), strict=True):
        to.copy_((rows.float() * gain) @ write)
    return table, (write.T @ write).to(lm_head.dtype)


def transition_scores(
    pre: Tensor, squares: Tensor, pull: Tensor, receiver_gate: Tensor, anchor_ids: Tensor, candidate_ids: Tensor,
    token_table: Tensor, score_table: Tensor, gram: Tensor, norm_weight: Tensor, lm_head: Tensor, eps: float,
    scores: Tensor, z: Tensor, gram_z: Tensor, block: int,
) -> Tensor:  # fmt: skip
    """Scores of every (predecessor, successor) pair of adjacent candidates.

    Args:
        pre: [N*B, d] last layer before its injection; squares: float32 [T, N*B], parts whose sum is |row|^2.
        pull: [N*B, m], Wr^T pre; the row stride may be larger.
        receiver_gate: float32 [N*B, m], G_r phi_L(pre) + b.
        candidate_ids: int64 [N, B-1, K]; ids must lie in the vocabulary.
        token_table: [V, 2m]; score_table [V, m] and gram [m, m]: see `fold_scores`.
        scores: float32 [N, B-1, K, K], written.
        z, gram_z: [N*(B-1)*K, m] scratch.

    Returns:
        scores.
    """
    m, hidden = gram.shape[0], pre.shape[1]
    batch, slots, count = candidate_ids.shape
    rows, k2 = batch * slots, max(16, triton.next_power_of_2(count))
    wide = z.element_size() == 4
    _candidate_messages[(rows, triton.cdiv(m, 128))](
        receiver_gate, anchor_ids, candidate_ids, token_table, z, m, count, block, K2=k2, BM=128, num_warps=4,
        **dependent(_candidate_messages, z),
    )  # fmt: skip
    torch.mm(z, gram, out=gram_z)
    _scores[(rows,)](
        pre, squares, pull, candidate_ids, z, gram_z, score_table, norm_weight, lm_head, scores,
        pre.shape[0], squares.shape[0], hidden, pull.stride(0), m, count, block, eps,
        K2=k2, BM=128 if k2 <= 32 else 64, BD=256 if k2 <= 32 else 128, TILES=triton.next_power_of_2(squares.shape[0]),
        PRECISION="ieee" if wide else "tf32", num_warps=4 if k2 <= 32 else 8, num_stages=1 if wide else 3,
        **dependent(_scores, z),
    )  # fmt: skip
    return scores
