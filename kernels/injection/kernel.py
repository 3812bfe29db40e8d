"""The gate of adjacent injection in one launch for few rows: three products with the readouts, norms, shift, sigmoid, product.

The readout's norm factors out of the products, so rows are multiplied raw and scaled afterwards, each by the norm of the slot the value
came from; the shift by one slot is a shift of the rows that are read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from torch import Tensor

# Rows of the gates and of the readouts per program, depth of a step, warps.
TILE = (16, 16, 128, 2)


@triton.jit
def _messages(
    readout, squares, gates, bias, table, anchor_ids, z, receiver_out, rows, rank, stride, m, block, tiles, root_rank,
    RECEIVER: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row_tile, tile = tl.program_id(0), tl.program_id(1)
    start_early(PDL)
    rm, rn, rk = tile * BM + tl.arange(0, BM), row_tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_ok, row_ok, tile_of = rm < m, rn < rows, tl.arange(0, TILES)
    weight = gates + tl.minimum(rm, m - 1).to(tl.int64)[:, None] * rank + rk[None, :]
    wait_previous(PDL)
    own_at = readout + tl.minimum(rn, rows - 1).to(tl.int64) * stride
    before_at = readout + tl.maximum(tl.minimum(rn, rows - 1) - 1, 0).to(tl.int64) * stride
    part = squares + tile_of[:, None] * rows
    part_ok = (tile_of < tiles)[:, None]
    own_squares = tl.sum(tl.load(part + tl.minimum(rn, rows - 1)[None, :], mask=part_ok, other=0.0), 0)
    before_squares = tl.sum(
        tl.load(part + tl.maximum(tl.minimum(rn, rows - 1) - 1, 0)[None, :], mask=part_ok, other=0.0), 0
    )
    receiver = tl.zeros((BM, BN), tl.float32)
    gate = tl.zeros((BM, BN), tl.float32)
    message = tl.zeros((BM, BN), tl.float32)
    for k in range(0, rank, BK):
        inside = k + rk < rank
        own = tl.load(own_at[None, :] + (k + rk)[:, None], mask=inside[:, None], other=0.0)
        before = tl.load(before_at[None, :] + (k + rk)[:, None], mask=inside[:, None], other=0.0)
        receiver = tl.dot(
            tl.load(weight + k, mask=inside[None, :], other=0.0), own, receiver, input_precision=PRECISION
        )
        gate = tl.dot(
            tl.load(weight + m * rank + k, mask=inside[None, :], other=0.0), before, gate, input_precision=PRECISION
        )
        message = tl.dot(
            tl.load(weight + 2 * m * rank + k, mask=inside[None, :], other=0.0),
            before,
            message,
            input_precision=PRECISION,
        )
    start_next(PDL)
    own_scale = root_rank / tl.maximum(tl.sqrt(own_squares), 1e-12)
    before_scale = root_rank / tl.maximum(tl.sqrt(before_squares), 1e-12)
    slot = rn % block
    ok = m_ok[:, None] & row_ok[None, :]
    first = ok & (slot == 1)[None, :]
    anchor = tl.load(anchor_ids + rn // block, mask=row_ok, other=0).to(tl.int64)
    known = table + anchor[None, :] * (2 * m) + rm[:, None]
    receiver = receiver * own_scale[None, :] + tl.load(bias + rm, mask=m_ok, other=0.0).to(tl.float32)[:, None]
    gate = tl.where(first, tl.load(known + m, mask=first, other=0.0).to(tl.float32), gate * before_scale[None, :])
    message = tl.where(first, tl.load(known, mask=first, other=0.0).to(tl.float32), message * before_scale[None, :])
    gated = tl.where((slot > 0)[None, :], tl.sigmoid(receiver + gate) * message, 0.0)
    out = rn.to(tl.int64)[None, :] * m + rm[:, None]
    tl.store(z + out, gated.to(z.dtype.element_ty), mask=ok)
    if RECEIVER:
        tl.store(receiver_out + out, receiver, mask=ok)


def gated_messages(
    readout: Tensor, squares: Tensor, gates: Tensor, bias: Tensor, token_table: Tensor, anchor_ids: Tensor, z: Tensor, block: int,
    receiver_gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gated messages of all slots; rows of slot 0 are zero.

    Args:
        readout: [N*B, r] R_l h, not normalised; the row stride may be larger.
        squares: float32 [T, N*B], parts whose sum is |readout|^2.
        gates: [3m, r], G_r above G_p above M. bias: [m].
        token_table: [V, 2m], [M p_v ; G_p p_v]; anchor_ids: int64 [N], the predecessors of slot 1.
        z: [N*B, m], written.
        receiver_gate: float32 [N*B, m], receives G_r phi + b when given (the transition scores need the last layer's).

    Returns:
        z.
    """
    rows, m = z.shape
    rank = gates.shape[1]
    wide = z.element_size() == 4
    bm, bn, bk, warps = TILE
    _messages[(triton.cdiv(rows, bn), triton.cdiv(m, bm))](
        readout, squares, gates, bias, token_table, anchor_ids, z, receiver_gate,
        rows, rank, readout.stride(0), m, block, squares.shape[0], float(rank) ** 0.5,
        RECEIVER=receiver_gate is not None, TILES=triton.next_power_of_2(squares.shape[0]), BM=bm, BN=bn, BK=32 if wide else bk,
        PRECISION="ieee" if wide else "tf32", num_warps=warps, num_stages=1 if wide else 3, **dependent(_messages, z),
    )  # fmt: skip
    return z
