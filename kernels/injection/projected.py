"""The gate of adjacent injection for many rows, from the vendor's projections of the readouts: norms, shift by one slot, product.

The readout's norm factors out of the projections, so rows are multiplied raw and scaled here, each by the norm of the slot the value
came from.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from torch import Tensor


@triton.jit
def _gate(
    readout, projected, bias, table, anchor_ids, z, receiver_out, hidden, squares_out,
    rank, stride, projected_stride, m, block, width, root_rank,
    RECEIVER: tl.constexpr, RANK: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = row % block
    at = tl.arange(0, RANK)
    inside = at < rank
    rm = tl.arange(0, M)
    ok = rm < m
    start_early(PDL)
    # The anchors are older than the kernel before: neither they nor the table need wait.
    known = table + tl.load(anchor_ids + row // block).to(tl.int64) * (2 * m) + rm
    known_message = tl.load(known, mask=ok, other=0.0).to(tl.float32)
    known_gate = tl.load(known + m, mask=ok, other=0.0).to(tl.float32)
    offset = tl.load(bias + rm, mask=ok, other=0.0).to(tl.float32)
    wait_previous(PDL)
    own = tl.load(readout + row.to(tl.int64) * stride + at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(readout + tl.maximum(row - 1, 0).to(tl.int64) * stride + at, mask=inside, other=0.0).to(tl.float32)
    own_scale = root_rank / tl.maximum(tl.sqrt(tl.sum(own * own, 0)), 1e-12)
    before_scale = root_rank / tl.maximum(tl.sqrt(tl.sum(before * before, 0)), 1e-12)
    own_row = projected + row.to(tl.int64) * projected_stride + rm
    before_row = projected + tl.maximum(row - 1, 0).to(tl.int64) * projected_stride + rm
    receiver = tl.load(own_row, mask=ok, other=0.0).to(tl.float32) * own_scale + offset
    first = slot == 1
    predicted_gate = tl.load(before_row + m, mask=ok, other=0.0).to(tl.float32) * before_scale
    predicted = tl.load(before_row + 2 * m, mask=ok, other=0.0).to(tl.float32) * before_scale
    predecessor = tl.where(first, known_gate, predicted_gate)
    message = tl.where(first, known_message, predicted)
    gated = tl.where(slot > 0, tl.sigmoid(receiver + predecessor) * message, 0.0)
    start_next(PDL)
    out = row.to(tl.int64) * m + rm
    tl.store(z + out, gated.to(z.dtype.element_ty), mask=ok)
    if RECEIVER:
        tl.store(receiver_out + out, receiver, mask=ok)
    if squares_out is not None:
        at = tl.arange(0, WIDTH)
        values = tl.load(hidden + row.to(tl.int64) * width + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(squares_out + row, tl.sum(values * values, 0))


def gate_projections(
    readout: Tensor,
    projected: Tensor,
    bias: Tensor,
    token_table: Tensor,
    anchor_ids: Tensor,
    z: Tensor,
    block: int,
    receiver_gate: Tensor | None = None,
    hidden: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    """Gated messages of all slots; rows of slot 0 are zero.

    Args:
        readout: [N*B, r] R_l h, not normalised; the row stride may be larger.
        projected: [N*B, 3m], readout times [G_r ; G_p ; M] transposed; the row stride may be larger.
        bias: [m].
        token_table: [V, 2m], [M p_v ; G_p p_v]; anchor_ids: int64 [N], the predecessors of slot 1; not written by the
            kernel just before, whose end is not awaited for them.
        z: [N*B, m], written.
        receiver_gate: float32 [N*B, m], receives G_r phi + b when given (the transition scores need the last layer's).
        hidden: [N*B, d], and squares: float32 [N*B], receives |hidden|^2; none of both where the write does without.

    Returns:
        z.
    """
    rows, m = z.shape
    rank, width = readout.shape[1], 0 if hidden is None else hidden.shape[1]
    _gate[(rows,)](
        readout, projected, bias, token_table, anchor_ids, z, receiver_gate, hidden, squares,
        rank, readout.stride(0), projected.stride(0), m, block, width, float(rank) ** 0.5,
        RECEIVER=receiver_gate is not None, RANK=triton.next_power_of_2(rank), M=triton.next_power_of_2(m),
        WIDTH=triton.next_power_of_2(max(width, 1)), num_warps=4,
        **dependent(_gate, z),
    )  # fmt: skip
    return z
