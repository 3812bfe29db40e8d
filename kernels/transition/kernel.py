"""Transition scores in message space: no [B-1, K, d] temporaries.

With z the gated message of a candidate predecessor, A_j = Wr^T (gamma * W_j) folded into a table and G = Wr^T Wr,

    S = (<gamma * pre, W_j> + s <z, A_j>) / sqrt((|pre|^2 + 2 s <Wr^T pre, z> + s^2 <z, G z>) / d + eps),    s = |pre| / sqrt(d)

so a slot reads K rows of the head once, for its own state, and K rows of width m for all its predecessors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import EARLY, dependent, start_early, start_next, wait_previous
from dspine_kernels.linear.kernel import Plan, Workspace, linear
from dspine_kernels.transition.walk import store_choices
from torch import Tensor

# Of m per program, and of the hidden size per step, for up to 16 candidates; of few pairs of a predecessor and a slot smaller ones.
MESSAGE_PART, MESSAGE_STEP, MESSAGE_WARPS = 128, 512, 4
FEW_PAIRS, FEW_PART, FEW_STEP, GRAM_PLAN = 1024, 32, 256, Plan(64, 16, 256, 1, 4, 2)
HELD, HELD_WARPS = 16 * 512, 4  # values of a slot's messages that are held in registers while their scores are made


@triton.jit
def _candidate_messages(
    pre, receiver_gate, anchor_ids, candidate_ids, table, norm_weight, lm_head, z, unary, m, hidden, part, count, block,
    K2: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Messages of K predecessors, a part of m at a time, and the same part of the successors' products with the slot's own state."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    start_early(PDL)
    rm = chunk * BM + tl.arange(0, BM)
    slots = block - 1
    n, slot = row // slots, row % slots
    state = n * block + slot + 1
    rk, rd = tl.arange(0, K2), tl.arange(0, BD)
    k_ok, m_ok = rk < count, rm < m
    # All but the candidates is older than the kernel before, which chose them, has waited for it, and let this one start late.
    anchor = tl.load(anchor_ids + n).to(tl.int64)
    receiver = tl.load(receiver_gate + state * m + rm, mask=m_ok, other=0.0, cache_modifier=".cg")[None, :]
    wait_previous(PDL)
    own = tl.load(candidate_ids + row * count + rk, mask=k_ok, other=0).to(tl.int64)
    before = tl.load(candidate_ids + tl.maximum(row - 1, 0) * count + rk, mask=k_ok, other=0).to(tl.int64)
    before = tl.where(slot > 0, before, anchor)
    at = table + before[:, None] * (2 * m) + rm[None, :]
    ok = k_ok[:, None] & m_ok[None, :]
    message = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(at + m, mask=ok, other=0.0).to(tl.float32) + receiver
    products = tl.zeros((K2,), tl.float32)
    for start in range(chunk * part, tl.minimum((chunk + 1) * part, hidden), BD):
        d = start + rd
        d_ok = d < tl.minimum((chunk + 1) * part, hidden)
        gain = tl.load(norm_weight + d, mask=d_ok, other=0.0).to(tl.float32)
        base = tl.load(pre + state.to(tl.int64) * hidden + d, mask=d_ok, other=0.0).to(tl.float32) * gain
        heads = tl.load(lm_head + own[:, None] * hidden + d[None, :], mask=k_ok[:, None] & d_ok[None, :], other=0.0)
        products += tl.sum(heads.to(tl.float32) * base[None, :], 1)
    start_next(PDL)
    to = z + (row * count + rk)[:, None].to(tl.int64) * m + rm[None, :]
    tl.store(to, (tl.sigmoid(gate) * message).to(z.dtype.element_ty), mask=ok)
    tl.store(unary + (row * tl.num_programs(1) + chunk) * count + rk, products, mask=k_ok)


@triton.jit
def _scores(
    squares_in, pull, candidate_ids, z, gram_z, unary, score_table, temperature, uniforms, scores, choices, soft,
    rows, tiles, parts, hidden, pull_stride, m, count, block, eps,
    K2: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr, PARTS: tl.constexpr, ONCE: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start_early(PDL)
    slots = block - 1
    state = row // slots * block + row % slots + 1
    rk, rm, tile, part = tl.arange(0, K2), tl.arange(0, BM), tl.arange(0, TILES), tl.arange(0, PARTS)
    k_ok = rk < count
    # All but gram_z is older than the kernel before (the product that makes gram_z, which has waited for it): it need not wait.
    own = tl.load(candidate_ids + row * count + rk, mask=k_ok, other=0, cache_modifier=".cg").to(tl.int64)
    squares = tl.sum(tl.load(squares_in + tile * rows + state, mask=tile < tiles, other=0.0, cache_modifier=".cg"), 0)
    heat, u = tl.load(temperature + row // slots), tl.load(uniforms + row)
    at_part = unary + (row * parts + part)[:, None] * count + rk[None, :]
    own_products = tl.load(at_part, mask=(part < parts)[:, None] & k_ok[None, :], other=0.0, cache_modifier=".cg")
    own_products = tl.sum(own_products, 0)
    products = tl.zeros((K2, K2), tl.float32)
    linear, quadratic = tl.zeros((K2,), tl.float32), tl.zeros((K2,), tl.float32)
    pair = (row * count + rk)[:, None].to(tl.int64) * m
    table_at, back_at = score_table + own[:, None] * m, pull + state.to(tl.int64) * pull_stride
    if ONCE:
        ok = k_ok[:, None] & (rm < m)[None, :]
        message = tl.load(z + pair + rm[None, :], mask=ok, other=0.0, cache_modifier=".cg")
        table = tl.load(table_at + rm[None, :], mask=ok, other=0.0)
        back = tl.load(back_at + rm, mask=rm < m, other=0.0, cache_modifier=".cg").to(tl.float32)
        products = tl.dot(message, tl.trans(table), products, input_precision=PRECISION)
        linear = tl.sum(message.to(tl.float32) * back[None, :], 1)
        wait_previous(PDL)
        changed = tl.load(gram_z + pair + rm[None, :], mask=ok, other=0.0).to(tl.float32)
        quadratic = tl.sum(message.to(tl.float32) * changed, 1)
    else:
        for start in range(0, m, BM):
            at = start + rm
            ok = k_ok[:, None] & (at < m)[None, :]
            message = tl.load(z + pair + at[None, :], mask=ok, other=0.0, cache_modifier=".cg")
            table = tl.load(table_at + at[None, :], mask=ok, other=0.0)
            products = tl.dot(message, tl.trans(table), products, input_precision=PRECISION)
            back = tl.load(back_at + at, mask=at < m, other=0.0, cache_modifier=".cg").to(tl.float32)
            linear += tl.sum(message.to(tl.float32) * back[None, :], 1)
        wait_previous(PDL)
        for start in range(0, m, BM):
            at = start + rm
            ok = k_ok[:, None] & (at < m)[None, :]
            message = tl.load(z + pair + at[None, :], mask=ok, other=0.0, cache_modifier=".cg").to(tl.float32)
            changed = tl.load(gram_z + pair + at[None, :], mask=ok, other=0.0).to(tl.float32)
            quadratic += tl.sum(message * changed, 1)
    start_next(PDL)
    scale = tl.sqrt(squares / hidden)
    refined = tl.maximum(squares + scale * (2.0 * linear + scale * quadratic), 0.0)
    result = (own_products[None, :] + scale * products) * tl.rsqrt(refined / hidden + eps)[:, None]
    to = scores + row.to(tl.int64) * count * count + rk[:, None] * count + rk[None, :]
    tl.store(to, result, mask=k_ok[:, None] & k_ok[None, :])
    store_choices(result, row, heat, u, choices, soft, count, K2)


def fold_scores(lm_head: Tensor, norm_weight: Tensor, write_weight: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of message space: A [V, m] = (gamma * W) Wr and G [m, m] = Wr^T Wr; products in float32, stored as the weights are."""
    write, gain = write_weight.float(), norm_weight.float()
    table = lm_head.new_empty(lm_head.shape[0], write.shape[1])
    for to, rows in zip(table.split(16384), lm_head.split(16384), strict=True):
        to.copy_((rows.float() * gain) @ write)
    return table, (write.T @ write).to(lm_head.dtype)


@dataclass(frozen=True)
class TransitionScratch:
    """What the scores of N*(B-1) rows leave on the way: z, gram_z [rows*K, m], unary float32 [rows, parts, K].

    choices int32 [rows, K] and soft float32 [rows, K, K] are for `walk_choices`.
    """

    z: Tensor
    gram_z: Tensor
    unary: Tensor
    choices: Tensor
    soft: Tensor

    @classmethod
    def of(cls, rows: int, count: int, m: int, like: Tensor) -> TransitionScratch:
        """Scratch in the dtype and on the device of `like`."""
        device, parts = like.device, triton.cdiv(m, FEW_PART if rows * count <= FEW_PAIRS else MESSAGE_PART)
        return cls(
            z=like.new_empty(rows * count, m),
            gram_z=like.new_empty(rows * count, m),
            unary=torch.empty(rows, parts, count, device=device),
            choices=torch.empty(rows, count, dtype=torch.int32, device=device),
            soft=torch.empty(rows, count, count, device=device),
        )


def transition_scores(
    pre: Tensor, squares: Tensor, pull: Tensor, receiver_gate: Tensor, anchor_ids: Tensor, candidate_ids: Tensor,
    token_table: Tensor, score_table: Tensor, gram: Tensor, norm_weight: Tensor, lm_head: Tensor, eps: float,
    temperature: Tensor, uniforms: Tensor, scores: Tensor, scratch: TransitionScratch, block: int,
) -> Tensor:  # fmt: skip
    """Scores of every (predecessor, successor) pair of adjacent candidates, and what each predecessor chooses (in the scratch).

    Args:
        pre: [N*B, d] last layer before its injection; squares: float32 [T, N*B], parts whose sum is |row|^2.
        pull: [N*B, m], Wr^T pre; the row stride may be larger.
        receiver_gate: float32 [N*B, m], G_r phi_L(pre) + b.
        candidate_ids: int64 [N, B-1, K]; ids must lie in the vocabulary.
        token_table: [V, 2m]; score_table [V, m] and gram [m, m]: see `fold_scores`.
        temperature: float32 [N]; uniforms: float32 [N, B-1].
        scores: float32 [N, B-1, K, K], written.

    Returns:
        scores.
    """
    m, hidden = gram.shape[0], pre.shape[1]
    batch, slots, count = candidate_ids.shape
    rows, k2, parts = batch * slots, max(16, triton.next_power_of_2(count)), scratch.unary.shape[1]
    z, wide = scratch.z, scratch.z.element_size() == 4
    few, step = len(z) <= FEW_PAIRS, triton.next_power_of_2(m)
    once = k2 * step <= HELD
    assert GRAM_PLAN.start != EARLY  # `_scores` reads before its wait
    _candidate_messages[(rows, parts)](
        pre, receiver_gate, anchor_ids, candidate_ids, token_table, norm_weight, lm_head, z, scratch.unary,
        m, hidden, triton.cdiv(triton.cdiv(hidden, parts), 8) * 8, count, block,
        K2=k2, BM=triton.next_power_of_2(triton.cdiv(m, parts)), BD=128 if k2 > 16 else FEW_STEP if few else MESSAGE_STEP,
        num_warps=MESSAGE_WARPS, num_stages=1 if wide else 3,
        **dependent(_candidate_messages, z),
    )  # fmt: skip
    if few and not wide:
        linear(
            z, gram, scratch.gram_z, GRAM_PLAN, Workspace(z, z)
        )  # symmetric: G z = z G^T; depth not shared, no workspace
    else:
        torch.mm(z, gram, out=scratch.gram_z)
    _scores[(rows,)](
        squares, pull, candidate_ids, z, scratch.gram_z, scratch.unary, score_table, temperature, uniforms, scores, scratch.choices,
        scratch.soft, pre.shape[0], squares.shape[0], parts, hidden, pull.stride(0), m, count, block, eps,
        K2=k2, BM=max(16, step) if once else 128 if k2 <= 32 else 64, TILES=triton.next_power_of_2(squares.shape[0]),
        PARTS=triton.next_power_of_2(parts), ONCE=once, PRECISION="ieee" if wide else "tf32",
        num_warps=HELD_WARPS if once else 4 if k2 <= 32 else 8, num_stages=1 if wide else 3,
        **dependent(_scores, z),
    )  # fmt: skip
    return scores
