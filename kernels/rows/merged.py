"""The injection's write where the following projections were made from the state before it, and only need its effect and their norm."""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from torch import Tensor


@triton.jit
def _write_and_project(
    hidden, update, projected, injected, out, columns, more, stride, block, eps,
    BLOCK: tl.constexpr, MORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at, beside = tl.arange(0, BLOCK), tl.arange(0, MORE)
    ok, more_ok = at < columns, beside < more
    start_early(PDL)
    wait_previous(PDL)
    kind = injected.dtype.element_ty
    values = tl.load(hidden + row * columns + at, mask=ok, other=0.0).to(tl.float32)
    from_row = update + row * (columns + more)
    change = tl.load(from_row + at, mask=ok, other=0.0).to(tl.float32)
    effect = tl.load(from_row + columns + beside, mask=more_ok, other=0.0).to(tl.float32)
    raw = tl.load(projected + row * stride + beside, mask=more_ok, other=0.0).to(tl.float32)
    # Slot 0 is copied; its row of `update` is computed along with the others and must not be trusted to be zero.
    scale = tl.sqrt(tl.sum(values * values, 0) / columns)
    written = row % block > 0
    values = (values + tl.where(written, change * scale, 0.0)).to(kind)
    start_next(PDL)
    tl.store(injected + row * columns + at, values, mask=ok)
    wide = values.to(tl.float32)
    norm = tl.rsqrt(tl.sum(wide * wide, 0) / columns + eps)
    tl.store(out + row * more + beside, ((raw + tl.where(written, effect * scale, 0.0)) * norm).to(kind), mask=more_ok)


def write_and_project(
    hidden: Tensor, update: Tensor, projected: Tensor, eps: float, block: int, injected: Tensor, out: Tensor
) -> None:
    """With W the projections times the gain of the RMSNorm before them, s = |hidden| / sqrt(d), 0 in the first of every `block` rows:
    injected = hidden + s Wr z and out = W injected / rms(injected) = (W hidden + s W Wr z) / rms(injected).

    Args:
        hidden: [N*B, d]. update: [N*B, d + p], Wr z beside W Wr z. projected: [N*B, p], W hidden; the row stride may be larger.
        injected: [N*B, d], written (may be hidden). out: [N*B, p], written.
    """
    (rows, columns), more = hidden.shape, out.shape[1]
    width, beside = triton.next_power_of_2(columns), triton.next_power_of_2(more)
    _write_and_project[(rows,)](
        hidden, update, projected, injected, out, columns, more, projected.stride(0), block, eps, BLOCK=width, MORE=beside,
        num_warps=min(16, max(1, beside // 512)), **dependent(_write_and_project, hidden),
    )  # fmt: skip
