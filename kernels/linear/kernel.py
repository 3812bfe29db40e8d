"""Products of a few rows with a large weight: the weight is the left operand, so sixteen rows fill the matrix unit's narrow side.

out = epilogue(x W^T) for x [R, K], W [N, K]. The depth may be shared among `splits` programs of a tile: the last one to arrive adds their
partial sums in a fixed order, so results do not depend on timing. Row norms cost no launch: the kernel that writes x stores x * gain
and, for every tile, the sum of squares of every row; the kernel that reads it scales its result by the row's 1 / rms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import LATE, dependent, start_early, start_next, wait_previous
from dspine_kernels.device import stages_that_fit
from dspine_kernels.linear.widen import by_bits, widened
from dspine_kernels.topk.keys import LOWEST, order_keys
from torch import Tensor


@triton.jit
def row_scales(squares, tiles, rows, at, ok, width, eps, TILES: tl.constexpr):
    """1 / rms of rows `at` [BN] from sums of squares [tiles, rows]."""
    tile = tl.arange(0, TILES)
    parts = tl.load(squares + tile[:, None] * rows + at[None, :], mask=(tile < tiles)[:, None] & ok[None, :], other=0.0)
    return tl.rsqrt(tl.sum(parts, 0) / width + eps)


@triton.jit
def _linear(
    x, weight, out, partial, counters, squares_in, residual, gain, scaled, squares_out, keys, channel_scales, x_scales,
    rows, columns, depth, share, tiles_in, width, eps, block, squares_columns,
    PAIR: tl.constexpr, NORMED: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr, SPLITS: tl.constexpr, EVEN: tl.constexpr,
    LEAD: tl.constexpr, BITS: tl.constexpr, FULL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_early(PDL)
    rm = tile * BM + tl.arange(0, BM)
    rn = row_tile * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    begin = split * share
    end = tl.minimum(begin + share, depth)
    w_row = weight + tl.minimum(rm, columns - 1).to(tl.int64) * depth
    w_at = w_row[:, None] + rk[None, :]
    row_ok = rn < rows
    ok = (rm < columns)[:, None] & row_ok[None, :]
    at = rn[None, :].to(tl.int64) * columns + rm[:, None]
    # Weights are nobody's output: gains and first steps need not wait.
    if scaled is not None:
        factor = tl.load(gain + rm, mask=rm < columns, other=0.0).to(tl.float32)[:, None]
    if LEAD > 0:
        first = tl.load(w_at + begin, mask=(begin + rk < end)[None, :], other=0.0)
    if LEAD > 1:
        second = tl.load(w_at + begin + BK, mask=(begin + BK + rk < end)[None, :], other=0.0)
    wait_previous(PDL)
    # Rows of a tile's end are left out, not clamped: many loads of one row from everywhere at once cost a tenth of a pass.
    x_at, x_ok = x + rn.to(tl.int64)[None, :] * depth + rk[:, None], row_ok[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    # What the epilogue reads is asked for now, so that the loop hides its latency.
    if NORMED:
        norm = row_scales(squares_in, tiles_in, rows, rn, row_ok, width, eps, TILES)[None, :]
    if WRITE:
        # Slot 0 is never written; elsewhere the update is scaled by the row's root mean square.
        scale = 1.0 / row_scales(squares_in, tiles_in, rows, rn, row_ok, width, 0.0, TILES)
        scale = tl.where(rn % block > 0, scale, 0.0)[None, :]
    if ADD:
        before = tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
    if PAIR:
        up = tl.zeros((BM, BN), tl.float32)
        up_at = w_at + columns.to(tl.int64) * depth
    if LEAD > 0:
        a = tl.load(x_at + begin, mask=(begin + rk < end)[:, None] & x_ok, other=0.0)
        acc = tl.dot(widened(first, a, BITS), a, acc, input_precision=PRECISION)
        begin += BK
    if LEAD > 1:
        a = tl.load(x_at + begin, mask=(begin + rk < end)[:, None] & x_ok, other=0.0)
        acc = tl.dot(widened(second, a, BITS), a, acc, input_precision=PRECISION)
        begin += BK
    for k in range(begin, end, BK):
        if EVEN:
            w = tl.load(w_at + k)
            a = tl.load(x_at + k) if FULL else tl.load(x_at + k, mask=x_ok, other=0.0)
        else:
            w = tl.load(w_at + k, mask=(k + rk < end)[None, :], other=0.0)
            a = tl.load(x_at + k, mask=(k + rk < end)[:, None] & x_ok, other=0.0)
        acc = tl.dot(widened(w, a, BITS), a, acc, input_precision=PRECISION)
        if PAIR:
            w = tl.load(up_at + k) if EVEN else tl.load(up_at + k, mask=(k + rk < end)[None, :], other=0.0)
            up = tl.dot(widened(w, a, BITS), a, up, input_precision=PRECISION)
    start_next(PDL)
    if SPLITS > 1:
        tiles = tl.num_programs(0) * tl.num_programs(1)
        mine = row_tile * tl.num_programs(1) + tile
        patch = tl.arange(0, BM)[:, None] + tl.arange(0, BN)[None, :] * BM
        tl.store(partial + (split * tiles + mine).to(tl.int64) * BM * BN + patch, acc)
        tl.debug_barrier()
        if tl.atomic_add(counters + mine, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(counters + mine, 0)
        acc = tl.zeros((BM, BN), tl.float32)
        for s in tl.static_range(SPLITS):
            acc += tl.load(partial + (s * tiles + mine).to(tl.int64) * BM * BN + patch, cache_modifier=".cg")
    kind = out.dtype.element_ty
    if channel_scales is not None:
        acc *= tl.load(channel_scales + rm, mask=rm < columns, other=0.0)[:, None]
        if PAIR:
            up *= tl.load(channel_scales + columns + rm, mask=rm < columns, other=0.0)[:, None]
    if x_scales is not None:
        acc *= tl.load(x_scales + rn, mask=row_ok, other=0.0)[None, :]
        if PAIR:
            up *= tl.load(x_scales + rn, mask=row_ok, other=0.0)[None, :]
    if NORMED:
        acc *= norm
    if PAIR:
        if NORMED:
            up *= norm
        acc = acc * tl.sigmoid(acc) * up
    if WRITE:
        acc *= scale
    if ADD:
        acc += before
    if squares_out is not None:
        acc = acc.to(kind).to(tl.float32)
        counted = tl.where(ok & (rm < squares_columns)[:, None], acc, 0.0)
        tl.store(squares_out + tile * rows + rn, tl.sum(counted * counted, 0), mask=row_ok)
    if scaled is not None:
        tl.store(scaled + at, (acc * factor).to(kind), mask=ok)
    if keys is not None:
        best = tl.max(tl.where(ok, order_keys(acc, rm[:, None]), LOWEST), 0)
        key_row = rn // block * (block - 1) + rn % block - 1
        tl.store(keys + key_row.to(tl.int64) * tl.num_programs(1) + tile, best, mask=row_ok & (rn % block > 0))
    tl.store(out + at, acc.to(kind), mask=ok)


@dataclass(frozen=True)
class Plan:
    """How a product is cut: rows of the weight and of x per program, depth of a step, programs per tile, warps, buffered steps."""

    weight_rows: int
    rows: int
    depth: int
    splits: int
    warps: int
    stages: int
    lead: int = 0  # steps of the weight, at most 2, read before the previous kernel is complete; not for pairs
    start: int = LATE  # when the next kernel may start

    def tiles(self, columns: int) -> int:
        """Tiles along the weight: the number of parts of the sums of squares that an adding product leaves."""
        return triton.cdiv(columns, self.weight_rows)


@dataclass(frozen=True)
class Workspace:
    """Scratch that all products of a stream may share: float32 partial sums, and int32 counters that are zero between launches."""

    partial: Tensor
    counters: Tensor

    @classmethod
    def for_plans(cls, plans: Iterable[tuple[Plan, int, int]], device: torch.device) -> Workspace:
        """Large enough for every (plan, rows of x, rows of the weight)."""
        patches = [(plan, plan.tiles(columns) * triton.cdiv(rows, plan.rows)) for plan, rows, columns in plans]
        sizes = [plan.splits * tiles * plan.weight_rows * plan.rows for plan, tiles in patches]
        counters = torch.zeros(max((tiles for _, tiles in patches), default=1), dtype=torch.int32, device=device)
        return cls(torch.empty(max(sizes, default=1), device=device), counters)


def linear(
    x: Tensor, weight: Tensor, out: Tensor, plan: Plan, workspace: Workspace, *,
    squares: Tensor | None = None, norm_width: int = 1, eps: float = 0.0, pair: bool = False, write: bool = False,
    residual: Tensor | None = None, squares_out: Tensor | None = None, squares_columns: int | None = None,
    gain: Tensor | None = None, scaled: Tensor | None = None,
    keys: Tensor | None = None, block: int = 1, scales: Tensor | None = None, x_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out [R, N] = epilogue(x W^T).

    Args:
        x: [R, K]; weight: [N, K], or [2N, K] when paired. K a multiple of 8.
        squares: float32 [T, R], parts of the sum of squares of a row of norm_width values. The product is scaled by the row's
            1 / rms (x is the row times its norm's gain); with `write` by its rms instead, and by 0 in the first of every `block` rows.
        pair: silu(x gate^T) * (x up^T) for weight = gate above up.
        residual: [R, N], added before rounding (may be `out`).
        squares_out: float32 [tiles, R], receives the parts of the result's sums of squares over the first
            squares_columns (all).
        scaled: [R, N], receives the result times gain [N].
        keys: int64 [N*(B-1), tiles], receives for all rows but the first of every `block` the largest key of every tile
            (`dspine_kernels.topk`); out should be float32 then.
        scales: float32, one per row of the weight, of a weight in float8, which is widened in registers where x is not float8 too.
        x_scales: float32 [R], of rows in float8.

    Returns:
        out.
    """
    rows, depth = x.shape
    columns = out.shape[1]
    assert plan.lead <= 2 and not (pair and (plan.splits > 1 or plan.lead))
    if plan.splits > 1:
        tiles = plan.tiles(columns) * triton.cdiv(rows, plan.rows)
        assert workspace.counters.numel() >= tiles
        assert workspace.partial.numel() >= plan.splits * tiles * plan.weight_rows * plan.rows
    share = triton.cdiv(triton.cdiv(depth, plan.splits), plan.depth) * plan.depth
    assert share * (plan.splits - 1) < depth
    step = (weight.element_size() * plan.weight_rows * (1 + pair) + x.element_size() * plan.rows) * plan.depth
    stages = stages_that_fit(x.device, plan.stages, step)
    _linear[(triton.cdiv(rows, plan.rows), plan.tiles(columns), plan.splits)](
        x, weight, out, workspace.partial, workspace.counters, squares, residual, gain, scaled, squares_out, keys, scales, x_scales,
        rows, columns, depth, share, 1 if squares is None else squares.shape[0], norm_width, eps, block,
        squares_columns or columns,
        PAIR=pair, NORMED=squares is not None and not write, ADD=residual is not None, WRITE=write,
        SPLITS=plan.splits, EVEN=depth % plan.depth == 0, LEAD=plan.lead, BITS=by_bits(weight, x), FULL=rows % plan.rows == 0,
        BM=plan.weight_rows, BN=plan.rows, BK=plan.depth,
        TILES=1 if squares is None else triton.next_power_of_2(squares.shape[0]),
        PRECISION="ieee" if x.element_size() == 4 else "tf32", LOWEST=LOWEST, num_warps=plan.warps, num_stages=stages,
        **dependent(_linear, x, plan.start),
    )  # fmt: skip
    return out
