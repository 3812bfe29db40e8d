"""One program per row; statistics in float32, values rounded to the compute dtype exactly where the eager model rounds them."""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from dspine_kernels.rows.rounded import LARGEST, round_row
from torch import Tensor


@triton.jit
def _rms_norm(x, weight, out, columns, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ok = at < columns
    start_early(PDL)
    wait_previous(PDL)
    values = tl.load(x + row * columns + at, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / columns + eps)
    gain = tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)
    start_next(PDL)
    tl.store(out + row * columns + at, (values * scale * gain).to(out.dtype.element_ty), mask=ok)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """RMSNorm of x [R, d] into out [R, d]; both contiguous."""
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    _rms_norm[(rows,)](
        x, weight, out, columns, eps, BLOCK=block, num_warps=min(16, max(1, block // 512)), **dependent(_rms_norm, x)
    )
    return out


@triton.jit
def _silu_mul(gate_up, out, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < columns
    start_early(PDL)
    wait_previous(PDL)
    gate = tl.load(gate_up + row * 2 * columns + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * columns + at, mask=ok, other=0.0).to(tl.float32)
    start_next(PDL)
    tl.store(out + row * columns + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=ok)


def silu_mul(gate_up: Tensor, out: Tensor) -> Tensor:
    """silu(gate) * up. gate_up [R, 2F], gate first -> out [R, F]"""
    rows, columns = out.shape
    _silu_mul[(rows, triton.cdiv(columns, 1024))](
        gate_up, out, columns, BLOCK=1024, num_warps=4, **dependent(_silu_mul, out)
    )
    return out


@triton.jit
def _write_and_norm(
    hidden, update, weight, injected, normed, squares_out, rounded, rounded_scales, columns, block, eps,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    ok = at < columns
    start_early(PDL)
    wait_previous(PDL)
    kind = injected.dtype.element_ty
    values = tl.load(hidden + row * columns + at, mask=ok, other=0.0).to(tl.float32)
    squares = tl.sum(values * values, 0)
    tl.store(squares_out + row, squares)
    change = tl.load(update + row * columns + at, mask=ok, other=0.0).to(tl.float32)
    # Slot 0 is copied; its row of `update` is computed along with the others and must not be trusted to be zero.
    change = tl.where(row % block > 0, change * tl.sqrt(squares / columns), 0.0)
    values = (values + change).to(kind)
    start_next(PDL)
    tl.store(injected + row * columns + at, values, mask=ok)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    gain = tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)
    values = (wide * scale * gain).to(kind)
    tl.store(normed + row * columns + at, values, mask=ok)
    if rounded is not None:
        round_row(values.to(tl.float32), rounded + row * columns, rounded_scales + row, at, ok, LARGEST)


def write_and_norm(
    hidden: Tensor,
    update: Tensor,
    weight: Tensor,
    eps: float,
    block: int,
    injected: Tensor,
    normed: Tensor,
    squares: Tensor,
    rounded: tuple[Tensor, Tensor] | None = None,
) -> None:
    """The injection's write, and the RMSNorm that follows it, in one pass over the rows.

    Args:
        hidden: [N*B, d] before the write; update: [N*B, d], Wr z.
        weight: gain [d] of the norm that reads the result (the next layer's, or the final one).
        injected, normed: [N*B, d], written. squares: float32 [N*B], receives |hidden|^2.
        rounded: float8_e4m3fn [N*B, d] and float32 [N*B], receive normed as `round_rows` rounds it.
    """
    rows, columns = hidden.shape
    narrow, scales = (None, None) if rounded is None else rounded
    width = triton.next_power_of_2(columns)
    _write_and_norm[(rows,)](
        hidden, update, weight, injected, normed, squares, narrow, scales, columns, block, eps,
        LARGEST=LARGEST, BLOCK=width, num_warps=min(16, max(1, width // 512)), **dependent(_write_and_norm, hidden),
    )  # fmt: skip


@triton.jit
def _embed_block(
    anchor_ids, table, weight, x, normed, mask_id, columns, block, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    ok = at < columns
    start_early(PDL)
    wait_previous(PDL)
    anchor = tl.load(anchor_ids + row // block)
    token = tl.where(row % block == 0, anchor, mask_id).to(tl.int64)
    values = tl.load(table + token * columns + at, mask=ok, other=0.0)
    to = row.to(tl.int64) * columns + at
    start_next(PDL)
    tl.store(x + to, values, mask=ok)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    gain = tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(normed + to, (wide * scale * gain).to(normed.dtype.element_ty), mask=ok)


def embed_block(
    anchor_ids: Tensor, table: Tensor, mask_id: int, weight: Tensor, eps: float, block: int, x: Tensor, normed: Tensor
) -> None:
    """Embeddings of [anchor, MASK x (B-1)] and their first RMSNorm. anchor_ids int64 [N], table [V, d] -> x, normed [N*B, d]"""
    rows, columns = x.shape
    width = triton.next_power_of_2(columns)
    _embed_block[(rows,)](
        anchor_ids, table, weight, x, normed, mask_id, columns, block, eps, BLOCK=width, num_warps=min(16, max(1, width // 512)),
        **dependent(_embed_block, x),
    )  # fmt: skip
