"""The gate of adjacent injection in one launch: three products with the readouts, norms, shift by one slot, sigmoid, product.

The readout's norm factors out of the products, so rows are multiplied raw and scaled afterwards, each by the norm of the slot the value
came from; the shift by one slot is a shift of the rows that are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, prefetch_share, share_bytes, start_next, wait_previous
from torch import Tensor


@triton.jit
def _messages(
    readout, gates, bias, table, anchor_ids, z, receiver_out, ahead, ahead_bytes, rows, rank, stride, m, block, root_rank,
    RECEIVER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row_tile, tile = tl.program_id(0), tl.program_id(1)
    start_next(PDL)
    prefetch_share(ahead, ahead_bytes, tile * tl.num_programs(0) + row_tile, PDL)
    rm, rn, rk = tile * BM + tl.arange(0, BM), row_tile * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_ok, row_ok = rm < m, rn < rows
    wait_previous(PDL)
    own_at = readout + tl.minimum(rn, rows - 1).to(tl.int64) * stride
    before_at = readout + tl.maximum(tl.minimum(rn, rows - 1) - 1, 0).to(tl.int64) * stride
    weight = gates + tl.minimum(rm, m - 1).to(tl.int64)[:, None] * rank + rk[None, :]
    receiver, gate, message = (
        tl.zeros((BM, BN), tl.float32),
        tl.zeros((BM, BN), tl.float32),
        tl.zeros((BM, BN), tl.float32),
    )
    own_squares, before_squares = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
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
        own, before = own.to(tl.float32), before.to(tl.float32)
        own_squares += tl.sum(own * own, 0)
        before_squares += tl.sum(before * before, 0)
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
    readout: Tensor, gates: Tensor, bias: Tensor, token_table: Tensor, anchor_ids: Tensor, z: Tensor, block: int,
    receiver_gate: Tensor | None = None, ahead: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gated messages of all slots; rows of slot 0 are zero.

    Args:
        readout: [N*B, r] R_l h, not normalised; the row stride may be larger.
        gates: [3m, r], G_r above G_p above M. bias: [m].
        token_table: [V, 2m], [M p_v ; G_p p_v]; anchor_ids: int64 [N], the predecessors of slot 1.
        z: [N*B, m], written.
        receiver_gate: float32 [N*B, m], receives G_r phi + b when given (the transition scores need the last layer's).
        ahead: a weight that a later kernel reads; it is asked into the L2 cache meanwhile.

    Returns:
        z.
    """
    rows, m = z.shape
    rank = gates.shape[1]
    few, wide = rows <= 32, z.element_size() == 4
    bm, bn = (16, 16) if few else (64, 64)
    grid = (triton.cdiv(rows, bn), triton.cdiv(m, bm))
    _messages[grid](
        readout, gates, bias, token_table, anchor_ids, z, receiver_gate, (z if ahead is None else ahead).view(torch.uint8),
        share_bytes(ahead, grid[0] * grid[1]),
        rows, rank, readout.stride(0), m, block, float(rank) ** 0.5,
        RECEIVER=receiver_gate is not None, BM=bm, BN=bn, BK=32 if wide else 128 if few else 64, PRECISION="ieee" if wide else "tf32",
        num_warps=2 if few else 4, num_stages=1 if wide else 3, **dependent(_messages, z),
    )  # fmt: skip
    return z
