"""y = x W^T for few rows: bound by reading W once, so everything around the product rides along.

Prologue: RMSNorm of x, whose row statistic is gathered while x streams by and applied to the accumulator. Epilogues: SwiGLU over a
merged [gate ; up] weight, residual addition, the injection's row-scaled write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dspine_kernels.linear.heuristics import Tile, tile
from torch import Tensor


@triton.jit
def _linear(
    x, w, out, gamma, residual, row_sums, rows, columns, inner, eps, block,
    NORM: tl.constexpr, GLU: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr, SUMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rm = tl.program_id(1) * BM + tl.arange(0, BM)
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    row_ok, column_ok = rm < rows, rn < columns
    x_rows = x + rm[:, None].to(tl.int64) * inner + rk[None, :]
    w_rows = w + rn[:, None].to(tl.int64) * inner + rk[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for start in range(0, inner, BK):
        inside = rk[None, :] < inner - start
        a = tl.load(x_rows + start, mask=row_ok[:, None] & inside, other=0.0)
        if NORM or SUMS:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            if NORM:
                g = tl.load(gamma + start + rk, mask=rk < inner - start, other=0.0).to(tl.float32)
                a = (wide * g[None, :]).to(x.dtype.element_ty)
        b = tl.load(w_rows + start, mask=column_ok[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
        if GLU:
            c = tl.load(w_rows + start + columns.to(tl.int64) * inner, mask=column_ok[:, None] & inside, other=0.0)
            up = tl.dot(a, tl.trans(c), up, input_precision=PRECISION)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        scale = tl.rsqrt(squares / inner + eps)[:, None]
        acc *= scale
        up *= scale
    if SUMS:  # noqa: SIM102 - `and` would mix a compile-time flag with a tensor
        if tl.program_id(0) == 0:
            tl.store(row_sums + rm, squares, mask=row_ok)
    if GLU:
        acc = acc * tl.sigmoid(acc) * up
    at = rm[:, None].to(tl.int64) * columns + rn[None, :]
    ok = row_ok[:, None] & column_ok[None, :]
    if WRITE:
        sums = tl.load(row_sums + rm, mask=row_ok, other=0.0)
        acc = tl.where((rm % block > 0)[:, None], acc * tl.sqrt(sums / columns)[:, None], 0.0)
    if ADD:
        acc += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=ok)


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    glu: bool = False,
    residual: Tensor | None = None,
    row_sums: Tensor | None = None,
    write_block: int = 0,
    shape: Tile | None = None,
    dependent_launch: bool = False,
) -> Tensor:
    """Writes ``x @ weight.T`` with its surroundings into `out`.

    Args:
        x: [M, K] contiguous, float32 or bfloat16.
        weight: [N, K], or [2N, K] with gate rows before up rows for `glu`.
        out: [M, N], any float dtype.
        norm_weight: RMSNorm gain [K] applied to x first, with `eps`.
        glu: silu(gate) * up.
        residual: [M, N] added last.
        row_sums: float32 [M]. Without `write_block` it receives |x_row|^2; with it, it supplies |residual_row|^2.
        write_block: B > 0 turns the product into the injection's write: rows with row % B == 0 get the residual alone, others
            residual + |residual_row| / sqrt(N) * product.
        shape: tile, instead of the heuristic's choice.
        dependent_launch: programmatic dependent launch: the kernel is scheduled while its predecessor drains.

    Returns:
        out.
    """
    rows, inner = x.shape
    columns = out.shape[1]
    shape = shape or tile(rows, columns, inner, x.dtype, glu)
    launch = {"launch_pdl": True} if dependent_launch else {}
    grid = (triton.cdiv(columns, shape.columns), triton.cdiv(rows, shape.rows))
    _linear[grid](
        x, weight, out, norm_weight, residual, row_sums, rows, columns, inner, eps, write_block,
        NORM=norm_weight is not None, GLU=glu, ADD=residual is not None, WRITE=write_block > 0,
        SUMS=row_sums is not None and write_block == 0,
        BM=shape.rows, BN=shape.columns, BK=shape.inner,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PDL=dependent_launch,
        num_warps=shape.warps, num_stages=shape.stages, **launch,
    )  # fmt: skip
    return out
