"""Rows rounded to float8 (e4m3) with one scale each, and what precedes a product: an addition, a norm, SwiGLU.

A row's largest value becomes the largest that e4m3 holds. The values that are rounded are those that the plain kernels would have stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from torch import Tensor

LARGEST = 448.0  # of e4m3


@triton.jit
def round_row(values, out, scale_out, at, ok, LARGEST: tl.constexpr):
    """Stores a row of float32 `values`, zero where not `ok`, at out + at, and its scale."""
    peak = tl.max(tl.abs(values), 0)
    scale = tl.where(peak > 0, peak / LARGEST, 1.0)
    tl.store(scale_out, scale)
    tl.store(out + at, (values / scale).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _round_rows(
    x, update, gain, out, scales, normed, columns, eps,
    ADD: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ok = at < columns
    start_early(PDL)
    wait_previous(PDL)
    kind = x.dtype.element_ty
    start = row * columns * (2 if SILU else 1)
    values = tl.load(x + start + at, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        values = (values + tl.load(update + start + at, mask=ok, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    if SILU:
        up = tl.load(x + start + columns + at, mask=ok, other=0.0).to(tl.float32)
        values = (values * tl.sigmoid(values) * up).to(kind).to(tl.float32)
    start_next(PDL)
    if ADD:
        tl.store(x + start + at, values.to(kind), mask=ok)
    if NORM:
        factor = tl.load(gain + at, mask=ok, other=0.0).to(tl.float32)
        values = (values * tl.rsqrt(tl.sum(values * values, 0) / columns + eps) * factor).to(kind).to(tl.float32)
        if normed is not None:
            tl.store(normed + row * columns + at, values.to(kind), mask=ok)
    round_row(values, out + row * columns, scales + row, at, ok, LARGEST)


def round_rows(
    x: Tensor, out: Tensor, scales: Tensor, *,
    update: Tensor | None = None, gain: Tensor | None = None, eps: float = 0.0, normed: Tensor | None = None, silu: bool = False,
) -> None:  # fmt: skip
    """x [R, K] -> out float8_e4m3fn [R, K] and scales float32 [R] with x ~ out * scales.

    Args:
        update: [R, K], added first; x receives the sum.
        gain: [K], the RMSNorm of the (updated) rows is rounded instead of them, and stored in `normed` [R, K] where that is given.
        silu: x is [R, 2K], gate first; silu(gate) * up is rounded.
    """
    rows, columns = out.shape
    block = triton.next_power_of_2(columns)
    _round_rows[(rows,)](
        x, update, gain, out, scales, normed, columns, eps,
        ADD=update is not None, NORM=gain is not None, SILU=silu, BLOCK=block, LARGEST=LARGEST,
        num_warps=min(16, max(1, block // 512)), **dependent(_round_rows, x),
    )  # fmt: skip


def round_rows_reference(values: Tensor, kind: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Naive reference: float32 [R, K] -> [R, K] and float32 [R]."""
    peak = values.abs().amax(dim=1)
    scales = torch.where(peak > 0, peak / LARGEST, 1.0)
    return (values / scales[:, None]).to(kind), scales
