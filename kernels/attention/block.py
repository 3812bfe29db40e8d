"""Block attention, split over the context: every program takes all queries that share a key head and one stretch of keys.

No mask tensor and no work on padding: a program past its sequence's length leaves at once. The block's own keys are normed and rotated
by the one program that uses them. Partial results are merged by a second, small launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normed_halves(base, row_ok, weight, cos, sin, positions, eps, DIM: tl.constexpr, HALF: tl.constexpr):
    """RMSNorm over the head and rotate-half; rows of [R, DIM] as two halves [R, HALF], zero beyond DIM/2."""
    half = tl.arange(0, HALF)
    ok = row_ok[:, None] & (half < DIM // 2)[None, :]
    first = tl.load(base[:, None] + half[None, :], mask=ok, other=0.0).to(tl.float32)
    second = tl.load(base[:, None] + (DIM // 2 + half)[None, :], mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
    first *= scale * tl.load(weight + half, mask=half < DIM // 2, other=0.0).to(tl.float32)[None, :]
    second *= scale * tl.load(weight + DIM // 2 + half, mask=half < DIM // 2, other=0.0).to(tl.float32)[None, :]
    angle = positions[:, None] * (DIM // 2) + half[None, :]
    c = tl.load(cos + angle, mask=ok, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=ok, other=0.0).to(tl.float32)
    return first * c - second * s, second * c + first * s


@triton.jit
def _attend(
    qkv, q_norm, k_norm, cos, sin, lengths, slots, keys, values, partial, stats, capacity, row_stride, sequence_stride, eps, scale,
    block, window, stretch, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HALF: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    n, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    owner = tl.load(slots + n) if SLOTS else n
    length = tl.load(lengths + owner)
    rq = tl.arange(0, BQ)
    slot = rq % BB
    head = kv_head * group + rq // BB
    ok = (slot < block) & (rq < group * BB)
    at_stats = ((n * splits + split) * KV_HEADS + kv_head).to(tl.int64) * BQ + rq
    own = split == splits - 1
    begin = split * stretch
    if (not own) & (begin >= length):
        tl.store(stats + at_stats * 2, tl.full((BQ,), float("-inf"), tl.float32))
        return
    kind = keys.dtype.element_ty
    q_base = qkv + (n * block + slot).to(tl.int64) * row_stride + head * DIM
    q1, q2 = _normed_halves(q_base, ok, q_norm, cos, sin, length + slot, eps, DIM, HALF)
    q1, q2 = (q1 * scale).to(kind), (q2 * scale).to(kind)
    half = tl.arange(0, HALF)
    half_ok = (half < DIM // 2)[None, :]
    best = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    o1 = tl.zeros((BQ, HALF), tl.float32)
    o2 = tl.zeros((BQ, HALF), tl.float32)
    if own:
        rb = tl.arange(0, BB)
        row = qkv + (n * block + rb).to(tl.int64) * row_stride
        k_ok = rb < block
        k1, k2 = _normed_halves(row + (HEADS + kv_head) * DIM, k_ok, k_norm, cos, sin, length + rb, eps, DIM, HALF)
        scores = tl.dot(q1, tl.trans(k1.to(kind)), input_precision=PRECISION)
        scores = tl.dot(q2, tl.trans(k2.to(kind)), scores, input_precision=PRECISION)
        visible = ok[:, None] & k_ok[None, :]
        if CAUSAL:
            visible = visible & (rb[None, :] <= slot[:, None])
        if WINDOW:
            visible = visible & (slot[:, None] - rb[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        best = tl.max(scores, 1)
        weights = tl.where(visible, tl.exp(scores - best[:, None]), 0.0)
        total = tl.sum(weights, 1)
        v = row[:, None] + (HEADS + KV_HEADS + kv_head) * DIM + half[None, :]
        o1 = tl.dot(weights.to(kind), tl.load(v, mask=k_ok[:, None] & half_ok, other=0.0), input_precision=PRECISION)
        o2 = tl.dot(
            weights.to(kind), tl.load(v + DIM // 2, mask=k_ok[:, None] & half_ok, other=0.0), input_precision=PRECISION
        )
    else:
        base = owner.to(tl.int64) * sequence_stride + kv_head.to(tl.int64) * capacity * DIM
        end = tl.minimum(begin + stretch, length)
        for start in range(begin, end, BC):
            column = start + tl.arange(0, BC)
            k_ok = column < end
            at = base + column[:, None].to(tl.int64) * DIM + half[None, :]
            k1 = tl.load(keys + at, mask=k_ok[:, None] & half_ok, other=0.0)
            k2 = tl.load(keys + at + DIM // 2, mask=k_ok[:, None] & half_ok, other=0.0)
            scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
            visible = ok[:, None] & k_ok[None, :]
            if WINDOW:
                visible = visible & (length + slot[:, None] - column[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))
            peak = tl.maximum(best, tl.max(scores, 1))
            safe = tl.where(peak == float("-inf"), 0.0, peak)
            weights = tl.where(visible, tl.exp(scores - safe[:, None]), 0.0)
            shrink = tl.where(best == float("-inf"), 0.0, tl.exp(best - safe))
            total = total * shrink + tl.sum(weights, 1)
            v1 = tl.load(values + at, mask=k_ok[:, None] & half_ok, other=0.0)
            v2 = tl.load(values + at + DIM // 2, mask=k_ok[:, None] & half_ok, other=0.0)
            o1 = tl.dot(weights.to(kind), v1, o1 * shrink[:, None], input_precision=PRECISION)
            o2 = tl.dot(weights.to(kind), v2, o2 * shrink[:, None], input_precision=PRECISION)
            best = peak
    tl.store(stats + at_stats * 2, best)
    tl.store(stats + at_stats * 2 + 1, total)
    at_partial = partial + at_stats[:, None] * DIM + half[None, :]
    tl.store(at_partial, o1, mask=half_ok)
    tl.store(at_partial + DIM // 2, o2, mask=half_ok)


@triton.jit
def _merge(
    partial, stats, out, splits, block,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    n, slot = row // block, row % block
    group: tl.constexpr = HEADS // KV_HEADS
    kv_head = head // group
    query = (head % group) * BB + slot
    d = tl.arange(0, WIDTH)
    ok = d < DIM
    best = float("-inf")
    total = 0.0
    acc = tl.zeros((WIDTH,), tl.float32)
    for split in range(splits):
        at = ((n * splits + split) * KV_HEADS + kv_head).to(tl.int64) * BQ + query
        peak = tl.load(stats + at * 2)
        if peak > float("-inf"):  # else nothing was visible to that stretch and nothing was stored
            top = tl.maximum(best, peak)
            keep = tl.exp(best - top)
            add = tl.exp(peak - top)
            total = total * keep + tl.load(stats + at * 2 + 1) * add
            acc = acc * keep + tl.load(partial + at * DIM + d, mask=ok, other=0.0) * add
            best = top
    tl.store(out + row.to(tl.int64) * HEADS * DIM + head * DIM + d, (acc / total).to(out.dtype.element_ty), mask=ok)


def partial_sizes(batch: int, kv_heads: int, heads: int, dim: int, block: int, splits: int) -> tuple[int, int]:
    """Elements of the float32 scratch tensors (partial outputs, statistics) for a number of splits, the block's own included."""
    queries = triton.next_power_of_2(heads // kv_heads) * max(16, triton.next_power_of_2(block))
    return batch * splits * kv_heads * queries * dim, batch * splits * kv_heads * queries * 2


def block_attention(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, lengths: Tensor,
    keys: Tensor, values: Tensor, out: Tensor, partial: Tensor, stats: Tensor,
    *, block: int, causal: bool, window: int | None, stretch: int, splits: int, slots: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one layer's block rows over [cached context ; own block].

    Args:
        qkv: [N*B, (H + 2 Hkv) D] raw projections.
        cos, sin: [positions, D/2] rotation tables; positions must reach lengths + B.
        lengths: int64 [S] on the device; never read by the host.
        keys, values: [S, Hkv, C, D], one layer of the cache (a view; the sequence stride may be larger).
        out: [N*B, H*D], written.
        partial, stats: float32 scratch, see `partial_sizes`.
        stretch, splits: context keys per program, and number of programs per key head: ceil(longest context / stretch) + 1.
        slots: int64 [N] on the device, the cache row (and length) of every sequence; None: sequence n owns row n.

    Returns:
        out.
    """
    _, kv_heads, capacity, dim = keys.shape
    batch, heads = out.shape[0] // block, out.shape[1] // dim
    wide = qkv.element_size() == 4
    bb = max(16, triton.next_power_of_2(block))
    bq = triton.next_power_of_2(heads // kv_heads) * bb
    _attend[(batch, kv_heads, splits)](
        qkv, q_norm, k_norm, cos, sin, lengths, slots, keys, values, partial, stats, capacity, qkv.shape[1], keys.stride(0), eps, dim**-0.5,
        block, window or 0, stretch, splits,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, CAUSAL=causal, WINDOW=window is not None,
        HALF=max(16, triton.next_power_of_2(dim // 2)), BQ=bq, BB=bb, BC=32 if wide else 64, PRECISION="ieee" if wide else "tf32",
        SLOTS=slots is not None,
        num_warps=4, num_stages=1 if wide else 2,
    )  # fmt: skip
    _merge[(batch * block, heads)](
        partial, stats, out, splits, block,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=triton.next_power_of_2(dim), BQ=bq, BB=bb, num_warps=1,
    )  # fmt: skip
    return out
