"""Block attention, split over the context: every program takes all queries that share a key head and one stretch of keys.

No mask tensor and no work on padding: a sequence's own length is divided among its programs, and one without keys leaves at once. The
first program of a head norms and rotates the block's own keys as well. With one program per head the result is final; otherwise partial
results are merged by a second, small launch. The context may lie in pages, which a table finds by sequence and column.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from dspine_kernels.device import stages_that_fit
from torch import Tensor

CONTEXT_TILE, STAGES, WARPS = 64, 3, 4  # keys per step, buffered steps
LOG2_E = 1.4426950408889634


@triton.jit
def _normed_rotated(
    base, row_ok, weight, cos, sin, positions, angle_stride, eps, factor,
    DIM: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """RMSNorm over the head, rotate-half, times a factor.

    [ROWS, 2 HALF]: both halves of DIM padded to HALF with zeros.
    """
    half = tl.arange(0, HALF)
    ok = row_ok[:, None] & (half < DIM // 2)[None, :]
    first = tl.load(base[:, None] + half[None, :], mask=ok, other=0.0).to(tl.float32)
    second = tl.load(base[:, None] + (DIM // 2 + half)[None, :], mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None] * factor
    first *= scale * tl.load(weight + half, mask=half < DIM // 2, other=0.0).to(tl.float32)[None, :]
    second *= scale * tl.load(weight + DIM // 2 + half, mask=half < DIM // 2, other=0.0).to(tl.float32)[None, :]
    angle = positions[:, None] * angle_stride + half[None, :]
    c = tl.load(cos + angle, mask=ok, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=ok, other=0.0).to(tl.float32)
    both = tl.join(first * c - second * s, second * c + first * s)
    return tl.reshape(tl.permute(both, (0, 2, 1)), (ROWS, 2 * HALF))


@triton.jit
def _attend(
    qkv, q_norm, k_norm, cos, sin, lengths, slots, pages, keys, values, out, partial, stats,
    length_stride, angle_stride, last_angle, table_stride, row_stride, sequence_stride, head_stride, column_stride,
    eps, scale, block, window, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    HALF: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr, PAGE: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    kv_head, n, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = HEADS // KV_HEADS
    start_early(PDL)
    # Slots, lengths and the cache are older than the kernel before: they need not wait.
    owner = tl.load(slots + n) if SLOTS else n
    length = tl.load(lengths + owner * length_stride)
    lowest = tl.maximum(length - window + 1, 0) if WINDOW else 0  # the first key that the block's first row sees
    share = tl.cdiv(tl.cdiv(length - lowest, splits), BC) * BC
    begin = lowest + split * share
    end = tl.minimum(begin + share, length)
    base = kv_head.to(tl.int64) * head_stride
    if not PAGE:
        base += owner.to(tl.int64) * sequence_stride
    wait_previous(PDL)
    rq = tl.arange(0, BQ)
    at_stats = ((n * splits + split) * KV_HEADS + kv_head).to(tl.int64) * BQ + rq
    if (split > 0) & (begin >= end):
        tl.store(stats + at_stats * 2, tl.full((BQ,), float("-inf"), tl.float32))
        return
    kind = keys.dtype.element_ty
    slot = rq % BB
    head = kv_head * group + rq // BB
    ok = (slot < block) & (rq < group * BB)
    q_base = qkv + (n * block + slot).to(tl.int64) * row_stride + head * DIM
    angle = tl.minimum(length + slot, last_angle)
    q = _normed_rotated(q_base, ok, q_norm, cos, sin, angle, angle_stride, eps, scale, DIM, HALF, BQ).to(kind)
    at_dim = tl.arange(0, 2 * HALF)
    dim_ok = at_dim % HALF < DIM // 2
    at_dim = at_dim // HALF * (DIM // 2) + at_dim % HALF
    best = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, 2 * HALF), tl.float32)
    if split == 0:
        rb = tl.arange(0, BB)
        row = qkv + (n * block + rb).to(tl.int64) * row_stride
        k_ok = rb < block
        k_base, k_angle = row + (HEADS + kv_head) * DIM, tl.minimum(length + rb, last_angle)
        k = _normed_rotated(k_base, k_ok, k_norm, cos, sin, k_angle, angle_stride, eps, 1.0, DIM, HALF, BB).to(kind)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        visible = ok[:, None] & k_ok[None, :]
        if CAUSAL:
            visible = visible & (rb[None, :] <= slot[:, None])
        if WINDOW:
            visible = visible & (slot[:, None] - rb[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        best = tl.maximum(tl.max(scores, 1), -1e30)  # rows of padding see nothing
        weights = tl.exp2(scores - best[:, None])
        total = tl.sum(weights, 1)
        v_at = row[:, None] + (HEADS + KV_HEADS + kv_head) * DIM + at_dim[None, :]
        v = tl.load(v_at, mask=k_ok[:, None] & dim_ok[None, :], other=0.0)
        acc = tl.dot(weights.to(kind), v, input_precision=PRECISION)
    key_base, value_base = keys + base, values + base
    if PAGE:  # a step's pages are looked up during the step before
        table = pages + n.to(tl.int64) * table_stride
        column = begin + tl.arange(0, BC)
        page = tl.load(table + column // PAGE, mask=column < end, other=0)
    for start in range(begin, end, BC):
        column = start + tl.arange(0, BC)
        k_ok = column < end
        if PAGE:
            at_column = page.to(tl.int64) * sequence_stride + (column % PAGE).to(tl.int64) * column_stride
            page = tl.load(table + (column + BC) // PAGE, mask=column + BC < end, other=0)
        else:
            at_column = column.to(tl.int64) * DIM
        at = at_column[:, None] + at_dim[None, :]
        ok_2d = k_ok[:, None] if DIM == 2 * HALF else k_ok[:, None] & dim_ok[None, :]
        k = tl.load(key_base + at, mask=ok_2d, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        visible = k_ok[None, :]
        if WINDOW:
            visible = visible & (length + slot[:, None] - column[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        peak = tl.maximum(best, tl.max(scores, 1))
        if WINDOW:
            peak = tl.maximum(peak, -1e30)  # a later row may see none of these keys
        weights = tl.exp2(scores - peak[:, None])
        shrink = tl.exp2(best - peak)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(value_base + at, mask=ok_2d, other=0.0)
        acc = tl.dot(weights.to(kind), v, acc * shrink[:, None], input_precision=PRECISION)
        best = peak
    start_next(PDL)
    if DIRECT:
        to = out + (n * block + slot).to(tl.int64)[:, None] * HEADS * DIM + head[:, None] * DIM + at_dim[None, :]
        tl.store(to, (acc / total[:, None]).to(kind), mask=ok[:, None] & dim_ok[None, :])
    else:
        tl.store(stats + at_stats * 2, best)
        tl.store(stats + at_stats * 2 + 1, total)
        tl.store(partial + at_stats[:, None] * DIM + at_dim[None, :], acc, mask=dim_ok[None, :])


@triton.jit
def _merge(
    partial, stats, out, splits, block,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BQ: tl.constexpr, BB: tl.constexpr,
    SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    start_early(PDL)
    wait_previous(PDL)
    n, slot = row // block, row % block
    group: tl.constexpr = HEADS // KV_HEADS
    kv_head = head // group
    query = (head % group) * BB + slot
    d, split = tl.arange(0, WIDTH), tl.arange(0, SPLITS)
    there = split < splits
    at = ((n * splits + split) * KV_HEADS + kv_head).to(tl.int64) * BQ + query
    peak = tl.load(stats + at * 2, mask=there, other=float("-inf"))
    # Of a stretch without keys nothing but the peak was stored; the loads do not wait for the peaks, the sums leave it out.
    share = tl.load(stats + at * 2 + 1, mask=there, other=0.0)
    part = tl.load(partial + at[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    start_next(PDL)
    used = peak > float("-inf")
    keep = tl.where(used, tl.exp2(peak - tl.max(peak, 0)), 0.0)
    total = tl.sum(tl.where(used, share * keep, 0.0), 0)
    acc = tl.sum(tl.where(used[:, None], part * keep[:, None], 0.0), 0)
    tl.store(
        out + row.to(tl.int64) * HEADS * DIM + head * DIM + d, (acc / total).to(out.dtype.element_ty), mask=d < DIM
    )


def partial_sizes(batch: int, kv_heads: int, heads: int, dim: int, block: int, splits: int) -> tuple[int, int]:
    """Elements of the float32 scratch tensors (partial outputs, statistics) for a number of splits."""
    queries = triton.next_power_of_2(heads // kv_heads) * max(16, triton.next_power_of_2(block))
    return batch * splits * kv_heads * queries * dim, batch * splits * kv_heads * queries * 2


def block_attention(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, lengths: Tensor,
    keys: Tensor, values: Tensor, out: Tensor, partial: Tensor, stats: Tensor,
    *, block: int, causal: bool, window: int | None, splits: int, slots: Tensor | None = None, pages: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one layer's block rows over [cached context ; own block].

    Args:
        qkv: [N*B, (H + 2 Hkv) D] raw projections.
        cos, sin: [positions, D/2] rotation tables, equal strides; what lies beyond them is rotated as the last position.
        lengths: int64 [S] on the device, of any stride; never read by the host.
        keys, values: [S, Hkv, C, D], one layer of the cache (a view; the sequence stride may be larger). With `pages`
            [P, Hkv, page, D], views of equal strides and a contiguous last dimension.
        out: [N*B, H*D], written.
        partial, stats: float32 scratch, see `partial_sizes`.
        splits: programs that share the context of one sequence and key head.
        slots: int64 [N] on the device, the cache row (and length) of every sequence; None: sequence n owns row n.
        pages: integers [N, most pages] on the device: column c of sequence n is in page pages[n, c // page]. Not with `slots`.

    Returns:
        out.
    """
    if pages is not None:
        assert slots is None
        assert keys.stride() == values.stride()
        assert keys.stride(3) == pages.stride(1) == 1
    _, kv_heads, capacity, dim = keys.shape
    batch, heads = out.shape[0] // block, out.shape[1] // dim
    wide = qkv.element_size() == 4
    bb = max(16, triton.next_power_of_2(block))
    bq = triton.next_power_of_2(heads // kv_heads) * bb
    half = max(16, triton.next_power_of_2(dim // 2))
    stages = stages_that_fit(
        qkv.device, STAGES, 2 * CONTEXT_TILE * 2 * half * qkv.element_size(), 2 * bq * 2 * half * qkv.element_size()
    )
    _attend[(kv_heads, batch, splits)](
        qkv, q_norm, k_norm, cos, sin, lengths, slots, pages, keys, values, out, partial, stats,
        lengths.stride(0), cos.stride(0), cos.shape[0] - 1,
        0 if pages is None else pages.stride(0), qkv.shape[1], keys.stride(0), capacity * dim if pages is None else keys.stride(1),
        keys.stride(2), eps, dim**-0.5 * LOG2_E, block, window or 0, splits,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, CAUSAL=causal, WINDOW=window is not None,
        HALF=half, BQ=bq, BB=bb, BC=32 if wide else CONTEXT_TILE, PRECISION="ieee" if wide else "tf32",
        SLOTS=slots is not None, PAGE=0 if pages is None else capacity, DIRECT=splits == 1,
        num_warps=WARPS, num_stages=1 if wide else stages,
        **dependent(_attend, qkv),
    )  # fmt: skip
    if splits > 1:
        _merge[(batch * block, heads)](
            partial, stats, out, splits, block,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=triton.next_power_of_2(dim), BQ=bq, BB=bb,
            SPLITS=triton.next_power_of_2(splits), num_warps=1 if splits <= 8 else 4, **dependent(_merge, qkv),
        )  # fmt: skip
    return out
