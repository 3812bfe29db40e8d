"""One launch from raw readouts to gated messages: normalisation, three projections, the shift by one slot, the gate.

The readout's norm factors out of the projections, so rows are multiplied raw and scaled afterwards, each by the norm of the slot the
value came from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _messages(
    readout, weights, bias, table, anchor_ids, z, receiver_out, rows, rank, m, block, root_rank,
    RECEIVER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    row_ok, column_ok = rm < rows, rn < m
    slot = rm % block
    shifted_ok = row_ok & (slot > 1)
    own = readout + rm[:, None].to(tl.int64) * rank + rk[None, :]
    before = own - rank
    w_receiver = weights + rn[:, None].to(tl.int64) * rank + rk[None, :]
    stride = m.to(tl.int64) * rank
    receiver = tl.zeros((BM, BN), tl.float32)
    predecessor = tl.zeros((BM, BN), tl.float32)
    message = tl.zeros((BM, BN), tl.float32)
    own_squares = tl.zeros((BM,), tl.float32)
    before_squares = tl.zeros((BM,), tl.float32)
    for start in range(0, rank, BK):
        inside = rk[None, :] < rank - start
        a = tl.load(own + start, mask=row_ok[:, None] & inside, other=0.0)
        p = tl.load(before + start, mask=shifted_ok[:, None] & inside, other=0.0)
        own_squares += tl.sum(a.to(tl.float32) * a.to(tl.float32), 1)
        before_squares += tl.sum(p.to(tl.float32) * p.to(tl.float32), 1)
        w_ok = column_ok[:, None] & inside
        w = tl.load(w_receiver + start, mask=w_ok, other=0.0)
        receiver = tl.dot(a, tl.trans(w), receiver, input_precision=PRECISION)
        w = tl.load(w_receiver + stride + start, mask=w_ok, other=0.0)
        predecessor = tl.dot(p, tl.trans(w), predecessor, input_precision=PRECISION)
        w = tl.load(w_receiver + 2 * stride + start, mask=w_ok, other=0.0)
        message = tl.dot(p, tl.trans(w), message, input_precision=PRECISION)
    own_scale = root_rank / tl.maximum(tl.sqrt(own_squares), 1e-12)
    before_scale = root_rank / tl.maximum(tl.sqrt(before_squares), 1e-12)
    b = tl.load(bias + rn, mask=column_ok, other=0.0).to(tl.float32)
    receiver = receiver * own_scale[:, None] + b[None, :]
    anchors = tl.load(anchor_ids + rm // block, mask=row_ok & (slot == 1), other=0).to(tl.int64)
    at_table = table + anchors[:, None] * (2 * m) + rn[None, :]
    first = (row_ok & (slot == 1))[:, None] & column_ok[None, :]
    message = message * before_scale[:, None] + tl.load(at_table, mask=first, other=0.0).to(tl.float32)
    predecessor = predecessor * before_scale[:, None] + tl.load(at_table + m, mask=first, other=0.0).to(tl.float32)
    gated = tl.where((slot > 0)[:, None], tl.sigmoid(receiver + predecessor) * message, 0.0)
    at = rm[:, None].to(tl.int64) * m + rn[None, :]
    ok = row_ok[:, None] & column_ok[None, :]
    tl.store(z + at, gated.to(z.dtype.element_ty), mask=ok)
    if RECEIVER:
        tl.store(receiver_out + at, receiver, mask=ok)


def gated_messages(
    readout: Tensor,
    weights: Tensor,
    bias: Tensor,
    token_table: Tensor,
    anchor_ids: Tensor,
    z: Tensor,
    block: int,
    receiver_gate: Tensor | None = None,
) -> Tensor:
    """Gated messages of all slots; rows of slot 0 are zero.

    Args:
        readout: [N*B, r] R_l h, not normalised.
        weights: [3m, r], G_r above G_p above M.
        bias: [m].
        token_table: [V, 2m], [M p_v ; G_p p_v]; anchor_ids: int64 [N], the predecessors of slot 1.
        z: [N*B, m], written.
        receiver_gate: float32 [N*B, m], receives G_r phi + b when given (the transition scores need the last layer's).

    Returns:
        z.
    """
    rows, rank = readout.shape
    m = z.shape[1]
    wide = readout.dtype == torch.float32
    bm = 16 if rows <= 16 else 32
    bn, bk = (16, 32) if wide else (16, 128)
    grid = (triton.cdiv(m, bn), triton.cdiv(rows, bm))
    _messages[grid](
        readout, weights, bias, token_table, anchor_ids, z, receiver_gate, rows, rank, m, block, float(rank) ** 0.5,
        RECEIVER=receiver_gate is not None, BM=bm, BN=bn, BK=bk, PRECISION="ieee" if wide else "tf32",
        num_warps=4, num_stages=2 if wide else 3,
    )  # fmt: skip
    return z
