"""The gate and the write of adjacent injection in one launch for few rows: the messages are made where the write's product reads them.

Readouts come with their projections [G_r ; G_p ; M] f, folded into the readout's own product. Every program makes all messages of its
rows anew, from L2: cheaper than a launch that makes them once.

Further rows of the weight may stand for projections of the state that follow: made from the state before the write, they receive the
write's effect here.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, prefetch, start_early, start_next, wait_previous
from torch import Tensor

# Rows of the weight and of the messages per program, depth of a step, warps: without projections, with them.
TILE, WIDE_TILE = (32, 16, 256, 8), (64, 16, 256, 8)


@triton.jit
def _row_sums(parts, tiles, rows, at, TILES: tl.constexpr):
    """Sums over the first of [tiles, rows] of float32, for rows `at`."""
    tile = tl.arange(0, TILES)
    part = parts + tile[:, None] * rows + at[None, :]
    return tl.sum(tl.load(part, mask=(tile < tiles)[:, None], other=0.0, cache_modifier=".cg"), 0)


@triton.jit
def _gated_write(
    projected, squares, bias, table, anchor_ids, weight, hidden, hidden_squares, gain, injected, scaled, squares_out, z_out, receiver_out,
    before, after, rows, columns, more, before_stride, m, stride, tiles, hidden_tiles, block, root_rank,
    MORE: tl.constexpr, KEEP: tl.constexpr, TILES: tl.constexpr, HIDDEN_TILES: tl.constexpr, ONCE: tl.constexpr, AHEAD: tl.constexpr,
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
    row_ok = rn < rows
    own = tl.minimum(rn, rows - 1)
    previous = tl.maximum(own - 1, 0)
    slot = own % block
    first = (slot == 1)[None, :]
    # Weights, anchors and the state are older than the kernel before (the readout, which has waited for them): they need not wait.
    w = tl.load(w_at, mask=(rk < m)[None, :], other=0.0)
    known = table + tl.load(anchor_ids + own // block).to(tl.int64) * (2 * m)
    if PDL and AHEAD:
        prefetch(known, tl.where((slot == 1) & row_ok & (tile == 0), AHEAD, 0).to(tl.int32))
    offset = tl.load(bias + rk, mask=rk < m, other=0.0)
    ok = (rm < width)[:, None] & row_ok[None, :]
    row = rn[None, :].to(tl.int64)
    at = row * columns + rm[:, None]
    in_state = (rm < tl.where(beyond, 0, columns))[:, None] & row_ok[None, :]
    base = tl.load(hidden + at, mask=in_state, other=0.0, cache_modifier=".cg")
    scale = tl.sqrt(_row_sums(hidden_squares, hidden_tiles, rows, own, HIDDEN_TILES) / columns)
    wait_previous(PDL)
    own_scale = (root_rank / tl.maximum(tl.sqrt(_row_sums(squares, tiles, rows, own, TILES)), 1e-12))[None, :]
    previous_scale = root_rank / tl.maximum(tl.sqrt(_row_sums(squares, tiles, rows, previous, TILES)), 1e-12)
    previous_scale = tl.where(first, 1.0, previous_scale[None, :])
    own_at = projected + own.to(tl.int64)[None, :] * stride + rk[:, None]
    # The same two rows of what precedes a slot: projections of the slot before, or the table's of the anchor.
    predicted = (projected + previous.to(tl.int64) * stride + m)[None, :] + rk[:, None]
    gate_at = tl.where(first, (known + m)[None, :] + rk[:, None], predicted)
    message_at = tl.where(first, known[None, :] + rk[:, None], predicted + m)
    if MORE:
        from_before = before + row * before_stride + rm[:, None]
        in_before = (rm < tl.where(beyond, more, 0))[:, None] & row_ok[None, :]
        base += tl.load(from_before, mask=in_before, other=0.0, cache_modifier=".cg")  # one of the two is zero
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, m, BK):
        inside = (k + rk < m)[:, None]
        receiver = (
            tl.load(own_at + k, mask=inside, other=0.0).to(tl.float32) * own_scale + offset.to(tl.float32)[:, None]
        )
        gate = tl.load(gate_at + k, mask=inside, other=0.0).to(tl.float32) * previous_scale
        message = tl.load(message_at + k, mask=inside, other=0.0).to(tl.float32) * previous_scale
        z = tl.where((slot > 0)[None, :], tl.sigmoid(receiver + gate) * message, 0.0).to(w.dtype)
        if KEEP:
            kept = (k + rk < tl.where(tile == 0, m, 0))[:, None] & row_ok[None, :]
            to = row * m + (k + rk)[:, None]
            tl.store(z_out + to, z, mask=kept)
            tl.store(receiver_out + to, receiver, mask=kept)
        acc = tl.dot(w, z, acc, input_precision=PRECISION)
        if not ONCE:
            w = tl.load(w_at + k + BK, mask=(k + BK + rk < m)[None, :], other=0.0)
            offset = tl.load(bias + k + BK + rk, mask=k + BK + rk < m, other=0.0)
    start_next(PDL)
    kind = injected.dtype.element_ty
    acc = acc * tl.where(slot > 0, scale, 0.0)[None, :] + base.to(tl.float32)
    if MORE:
        to = row * more + rm[:, None]
        if beyond:
            tl.store(after + to, acc.to(kind), mask=ok)
            return
    acc = tl.where(ok, acc.to(kind).to(tl.float32), 0.0)
    tl.store(squares_out + tile * rows + rn, tl.sum(acc * acc, 0), mask=row_ok)
    if scaled is not None:
        factor = tl.load(gain + rm, mask=rm < columns, other=0.0).to(tl.float32)[:, None]
        tl.store(scaled + at, (acc * factor).to(kind), mask=ok)
    tl.store(injected + at, acc.to(kind), mask=ok)


def write_parts(columns: int, more: int = 0) -> int:
    """Parts of the sums of squares that `gated_write` leaves of rows of that many columns, beside `more` columns of projections."""
    return triton.cdiv(columns, (WIDE_TILE if more else TILE)[0])


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
        squares_out: float32 [write_parts(d, p), N*B], receives parts of |injected|^2.
        before, after: [N*B, p]; after receives before + s W Wr z, which is W injected if before is W hidden, whose row stride may be
            larger. With a weight of d + p rows only.
        z, receiver_gate: [N*B, m] and float32 [N*B, m], receive messages and G_r phi + b where both are given (the transition
            scores need the last layer's).
    """
    rows, columns = hidden.shape
    m, keep, wide = weight.shape[1], z is not None and receiver_gate is not None, hidden.element_size() == 4
    more, before_stride = (0, 0) if before is None else (before.shape[1], before.stride(0))
    assert weight.shape[0] == columns + more
    bm, bn, bk, warps = WIDE_TILE if more else TILE
    bk = 32 if wide else min(bk, max(16, triton.next_power_of_2(m)))
    _gated_write[(triton.cdiv(rows, bn), triton.cdiv(columns, bm) + triton.cdiv(more, bm))](
        projected, squares, bias, token_table, anchor_ids, weight, hidden, hidden_squares, gain, injected, scaled, squares_out,
        z, receiver_gate, before, after, rows, columns, more, before_stride, m, projected.stride(0),
        squares.shape[0], hidden_squares.shape[0], block, float(rank) ** 0.5, MORE=more > 0, KEEP=keep,
        TILES=triton.next_power_of_2(squares.shape[0]), HIDDEN_TILES=triton.next_power_of_2(hidden_squares.shape[0]),
        ONCE=m <= bk, AHEAD=2 * m * token_table.element_size() if m % 4 == 0 else 0, BM=bm, BN=bn, BK=bk,
        PRECISION="ieee" if wide else "tf32", num_warps=warps, num_stages=1,
        **dependent(_gated_write, hidden),
    )  # fmt: skip
