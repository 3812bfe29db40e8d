"""The gate and the write of adjacent injection in one launch for few rows: the messages are made where the write's product reads them.

Readouts come with their projections [G_r ; G_p ; M] f, folded into the readout's own product. Every program makes all messages of its
rows anew, from L2: cheaper than a launch that makes them once.

Further rows of the weight may stand for projections of the state that follow: made from the state before the write, they receive the
write's effect here.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from torch import Tensor

# Rows of the weight and of the messages per program, depth of a step, warps.
TILE = (32, 16, 512, 8)


@triton.jit
def _row_sums(parts, tiles, rows, at, TILES: tl.constexpr):
    """Sums over the first of [tiles, rows] of float32, for rows `at`."""
    tile = tl.arange(0, TILES)
    return tl.sum(tl.load(parts + tile[:, None] * rows + at[None, :], mask=(tile < tiles)[:, None], other=0.0), 0)


@triton.jit
def _gated_write(
    projected, squares, bias, table, anchor_ids, weight, hidden, hidden_squares, gain, injected, scaled, squares_out, z_out, receiver_out,
    before, after, rows, columns, more, before_stride, m, stride, tiles, hidden_tiles, block, root_rank,
    MORE: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr, HIDDEN_TILES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row_tile, tile = tl.program_id(0), tl.program_id(1)
    start_early(PDL)
    rn, rk = row_tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    own_tiles = tl.cdiv(columns, BM)
    beyond = tile >= own_tiles
    width = tl.where(beyond, more, columns)
    rm = tl.where(beyond, tile - own_tiles, tile) * BM + tl.arange(0, BM)
    w_row = tl.minimum(rm, width - 1) + tl.where(beyond, columns, 0)
    w_at = weight + w_row.to(tl.int64)[:, None] * m + rk[None, :]
    w = tl.load(w_at, mask=(rk < m)[None, :], other=0.0)  # nobody's output: need not wait
    wait_previous(PDL)
    row_ok = rn < rows
    own = tl.minimum(rn, rows - 1)
    previous = tl.maximum(own - 1, 0)
    slot = own % block
    first = (slot == 1)[None, :]
    known = table + tl.load(anchor_ids + own // block).to(tl.int64)[None, :] * (2 * m) + rk[:, None]
    own_scale = (root_rank / tl.maximum(tl.sqrt(_row_sums(squares, tiles, rows, own, TILES)), 1e-12))[None, :]
    previous_scale = (root_rank / tl.maximum(tl.sqrt(_row_sums(squares, tiles, rows, previous, TILES)), 1e-12))[None, :]
    own_at = projected + own.to(tl.int64)[None, :] * stride + rk[:, None]
    previous_at = projected + previous.to(tl.int64)[None, :] * stride + m + rk[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, m, BK):
        inside = (k + rk < m)[:, None]
        start = inside & first
        receiver = tl.load(own_at + k, mask=inside, other=0.0).to(tl.float32) * own_scale
        receiver += tl.load(bias + k + rk, mask=k + rk < m, other=0.0).to(tl.float32)[:, None]
        gate = tl.load(previous_at + k, mask=inside, other=0.0).to(tl.float32) * previous_scale
        message = tl.load(previous_at + m + k, mask=inside, other=0.0).to(tl.float32) * previous_scale
        gate = tl.where(first, tl.load(known + m + k, mask=start, other=0.0).to(tl.float32), gate)
        message = tl.where(first, tl.load(known + k, mask=start, other=0.0).to(tl.float32), message)
        z = tl.where((slot > 0)[None, :], tl.sigmoid(receiver + gate) * message, 0.0).to(w.dtype)
        if KEEP:
            kept = (k + rk < tl.where(tile == 0, m, 0))[:, None] & row_ok[None, :]
            to = rn[None, :].to(tl.int64) * m + (k + rk)[:, None]
            tl.store(z_out + to, z, mask=kept)
            tl.store(receiver_out + to, receiver, mask=kept)
        acc = tl.dot(w, z, acc, input_precision=PRECISION)
        w = tl.load(w_at + k + BK, mask=(k + BK + rk < m)[None, :], other=0.0)
    start_next(PDL)
    ok = (rm < width)[:, None] & row_ok[None, :]
    row = rn[None, :].to(tl.int64)
    kind = injected.dtype.element_ty
    scale = tl.sqrt(_row_sums(hidden_squares, hidden_tiles, rows, own, HIDDEN_TILES) / columns)
    acc *= tl.where(slot > 0, scale, 0.0)[None, :]
    if MORE:
        to = row * more + rm[:, None]
        if beyond:
            acc += tl.load(before + row * before_stride + rm[:, None], mask=ok, other=0.0).to(tl.float32)
            tl.store(after + to, acc.to(kind), mask=ok)
            return
    at = row * columns + rm[:, None]
    acc += tl.load(hidden + at, mask=ok, other=0.0).to(tl.float32)
    acc = tl.where(ok, acc.to(kind).to(tl.float32), 0.0)
    tl.store(squares_out + tile * rows + rn, tl.sum(acc * acc, 0), mask=row_ok)
    if scaled is not None:
        factor = tl.load(gain + rm, mask=rm < columns, other=0.0).to(tl.float32)[:, None]
        tl.store(scaled + at, (acc * factor).to(kind), mask=ok)
    tl.store(injected + at, acc.to(kind), mask=ok)


def write_parts(columns: int) -> int:
    """Parts of the sums of squares that `gated_write` leaves of rows of that many columns."""
    return triton.cdiv(columns, TILE[0])


def gated_write(
    projected: Tensor, squares: Tensor, rank: int, bias: Tensor, token_table: Tensor, anchor_ids: Tensor, weight: Tensor,
    hidden: Tensor, hidden_squares: Tensor, injected: Tensor, squares_out: Tensor, block: int, *,
    gain: Tensor | None = None, scaled: Tensor | None = None, before: Tensor | None = None, after: Tensor | None = None,
    z: Tensor | None = None, receiver_gate: Tensor | None = None,
) -> None:  # fmt: skip
    """hidden + s Wr z with s = |hidden| / sqrt(d), z the gated messages; slot 0 is copied.

    Args:
        projected: [N*B, 3m], readouts (not normalised) times [G_r ; G_p ; M] transposed; the row stride may be larger.
        squares: float32 [T, N*B], parts whose sum is |readout|^2 of `rank` values; hidden_squares: the same of hidden.
        bias: [m]. token_table: [V, 2m], [M p_v ; G_p p_v]; anchor_ids: int64 [N], the predecessors of slot 1.
        weight: [d, m], Wr, or [d + p, m] with W Wr below for projections W [p, d]. hidden: [N*B, d].
        injected: [N*B, d], written (may be hidden). scaled: [N*B, d], receives injected times gain [d] where given.
        squares_out: float32 [write_parts(d), N*B], receives parts of |injected|^2.
        before, after: [N*B, p]; after receives before + s W Wr z, which is W injected if before is W hidden, whose row stride may be
            larger. With a weight of d + p rows only.
        z, receiver_gate: [N*B, m] and float32 [N*B, m], receive messages and G_r phi + b where both are given (the transition
            scores need the last layer's).
    """
    rows, columns = hidden.shape
    m, keep, wide = weight.shape[1], z is not None and receiver_gate is not None, hidden.element_size() == 4
    more, before_stride = (0, 0) if before is None else (before.shape[1], before.stride(0))
    assert weight.shape[0] == columns + more
    bm, bn, bk, warps = TILE
    _gated_write[(triton.cdiv(rows, bn), triton.cdiv(columns, bm) + triton.cdiv(more, bm))](
        projected, squares, bias, token_table, anchor_ids, weight, hidden, hidden_squares, gain, injected, scaled, squares_out,
        z, receiver_gate, before, after, rows, columns, more, before_stride, m, projected.stride(0),
        squares.shape[0], hidden_squares.shape[0], block, float(rank) ** 0.5, MORE=more > 0, KEEP=keep,
        TILES=triton.next_power_of_2(squares.shape[0]), HIDDEN_TILES=triton.next_power_of_2(hidden_squares.shape[0]),
        BM=bm, BN=bn, BK=32 if wide else bk, PRECISION="ieee" if wide else "tf32", num_warps=warps, num_stages=1,
        **dependent(_gated_write, hidden),
    )  # fmt: skip
