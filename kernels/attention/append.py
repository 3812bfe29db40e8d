"""Context rows into the cache: key norm, rotation and both stores in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _append(
    rows, k_norm, cos, sin, lengths, counts, slots, keys, values, tokens, capacity, row_stride, sequence_stride, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    n, t, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    owner = tl.load(slots + n) if SLOTS else n
    start = tl.load(lengths + owner)
    position = start + t
    if (t >= tl.load(counts + n)) | (position >= capacity):
        return
    half = tl.arange(0, HALF)
    ok = half < DIM // 2
    row = rows + (n * tokens + t).to(tl.int64) * row_stride + head * DIM
    first = tl.load(row + half, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(row + DIM // 2 + half, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 0) + tl.sum(second * second, 0)) / DIM + eps)
    first *= scale * tl.load(k_norm + half, mask=ok, other=0.0).to(tl.float32)
    second *= scale * tl.load(k_norm + DIM // 2 + half, mask=ok, other=0.0).to(tl.float32)
    c = tl.load(cos + position * (DIM // 2) + half, mask=ok, other=0.0).to(tl.float32)
    s = tl.load(sin + position * (DIM // 2) + half, mask=ok, other=0.0).to(tl.float32)
    kind = keys.dtype.element_ty
    at = owner.to(tl.int64) * sequence_stride + head.to(tl.int64) * capacity * DIM + position.to(tl.int64) * DIM
    tl.store(keys + at + half, (first * c - second * s).to(kind), mask=ok)
    tl.store(keys + at + DIM // 2 + half, (second * c + first * s).to(kind), mask=ok)
    value = row + HEADS * DIM
    tl.store(values + at + half, tl.load(value + half, mask=ok, other=0.0), mask=ok)
    tl.store(values + at + DIM // 2 + half, tl.load(value + DIM // 2 + half, mask=ok, other=0.0), mask=ok)


def append_context(
    rows: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    counts: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor | None = None,
) -> None:
    """Appends the first counts[n] of T projected rows per sequence; lengths stay the caller's to advance.

    Args:
        rows: [N, T, 2*Hkv*D] raw key rows, then value rows.
        cos, sin: [positions, D/2] rotation tables.
        lengths: int64 [S], counts: int64 [N], on the device. Rows past the capacity are dropped.
        keys, values: [S, Hkv, C, D], one layer of the cache; the sequence stride may be larger (a view of [S, L, Hkv, C, D]).
        slots: int64 [N] on the device, the cache row (and length) of every sequence; None: sequence n owns row n. Rows may repeat
            where the counts are 0.
    """
    batch, tokens, width = rows.shape
    heads, capacity, dim = keys.shape[1:]
    _append[(batch, tokens, heads)](
        rows, k_norm, cos, sin, lengths, counts, slots, keys, values, tokens, capacity, width, keys.stride(0), eps,
        HEADS=heads, DIM=dim, HALF=triton.next_power_of_2(dim // 2), SLOTS=slots is not None, num_warps=1,
    )  # fmt: skip
