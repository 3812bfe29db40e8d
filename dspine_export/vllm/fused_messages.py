"""Readouts and gated messages of a layer on CUDA, by the kernels that measured best for the number of rows.

Few rows: our skinny product, whose epilogue leaves the readouts' norms, and one launch for gates and messages. Many rows: the vendor's
products around one kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def few(rows: Tensor) -> bool:
    """Whether `rows` [R, d] are few enough, and of a type, for the skinny products."""
    from dspine_kernels.linear import FEW_ROWS

    return rows.shape[0] <= FEW_ROWS and rows.element_size() == 2


def fused_messages(
    hidden: Tensor, readout: Tensor, gates: Tensor, bias: Tensor, token_table: Tensor, anchor_ids: Tensor, block: int,
    receiver_gate: Tensor | None = None, *, skinny: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gated messages z [N*B, m] of all slots, and the product with `readout`.

    Args:
        hidden: [N*B, d]. readout: [r, d], or more rows behind the r ones. gates: [3m, r].
        receiver_gate: float32 [N*B, m], receives G_r phi + b when given.
        skinny: which way, by default as the rows suggest.

    Returns:
        z and the product [N*B, rows of readout].
    """
    from dspine_kernels.injection import gate_projections, gated_messages
    from dspine_kernels.linear import linear

    rows, rank, m = hidden.shape[0], gates.shape[1], bias.shape[0]
    z = hidden.new_empty(rows, m)
    if few(hidden) if skinny is None else skinny:
        plan, workspace = skinny_plan(rows, *readout.shape, hidden.dtype, hidden.device)
        read = hidden.new_empty(rows, readout.shape[0])
        squares = torch.empty(plan.tiles(readout.shape[0]), rows, device=hidden.device)
        linear(hidden, readout, read, plan, workspace, squares_out=squares, squares_columns=rank)
        gated_messages(read, squares, gates, bias, token_table, anchor_ids, z, block, receiver_gate)
    else:
        read = torch.mm(hidden, readout.T)
        feature = read[:, :rank]
        gate_projections(feature, torch.mm(feature, gates.T), bias, token_table, anchor_ids, z, block, receiver_gate)
    return z, read


@functools.cache
def skinny_plan(rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """Plan and scratch of a product. The scratch's counters are zero between launches, so it is made once, outside of any graph."""
    from dspine_kernels.linear import Workspace, plan_for

    plan = plan_for(rows, columns, depth, dtype.itemsize)
    return plan, Workspace.for_plans([(plan, rows, columns)], device)


def skinny_write(
    hidden: Tensor, z: Tensor, write: Tensor, sums: Tensor, norm_weight: Tensor, block: int
) -> tuple[Tensor, Tensor]:
    """The write of few rows, and the norm behind it but for its division.

    Args:
        hidden: [N*B, d]; z: [N*B, m] gated messages; write: [d, m].
        sums: float32 [T, N*B], parts of the sums of squares of `hidden`.

    Returns:
        The injected rows times `norm_weight` [N*B, d], and parts of their sums of squares without it, float32 [T, N*B].
    """
    from dspine_kernels.linear import linear

    rows, width = hidden.shape
    plan, workspace = skinny_plan(rows, *write.shape, hidden.dtype, hidden.device)
    injected, scaled = torch.empty_like(hidden), torch.empty_like(hidden)
    squares = torch.empty(plan.tiles(width), rows, device=hidden.device)
    linear(
        z, write, injected, plan, workspace, norm_width=width, write=True, block=block, residual=hidden, squares=sums,
        gain=norm_weight, scaled=scaled, squares_out=squares,
    )  # fmt: skip
    return scaled, squares


def skinny_logits(
    normed: Tensor, weight: Tensor, block: int, squares: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor, int]:
    """Float32 logits of few rows, and the largest key of every tile of them for all rows but the first of every block.

    normed [N*B, d], weight [V, d] -> logits [N*B, V], keys int64 [N*(B-1), tiles], logits per tile. With squares and eps normed is what
    `skinny_write` returns.
    """
    from dspine_kernels.linear import linear

    rows, width = normed.shape
    plan, workspace = skinny_plan(rows, *weight.shape, normed.dtype, normed.device)
    logits = torch.empty(rows, weight.shape[0], device=normed.device)
    slots = rows // block * (block - 1)
    keys = torch.empty(slots, plan.tiles(weight.shape[0]), dtype=torch.int64, device=normed.device)
    linear(
        normed, weight, logits, plan, workspace, keys=keys, block=block, squares=squares, norm_width=width, eps=eps
    )  # fmt: skip
    return logits, keys, plan.weight_rows
