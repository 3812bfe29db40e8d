"""Context rows of all layers into a paged cache: key norm, rotation and both stores in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _store(
    rows, k_norms, cos, sin, positions, slots, keys, offsets,
    angle_stride, last_angle, row_stride, page_stride, head_stride, column_stride, value_offset, eps,
    PAGE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    angle = tl.minimum(tl.load(positions + row), last_angle) * angle_stride
    head, half = tl.arange(0, BH), tl.arange(0, HALF)
    half_ok = half < DIM // 2
    ok = (head < HEADS)[:, None] & half_ok[None, :]
    key = rows + row * row_stride + layer * (2 * HEADS * DIM) + head[:, None] * DIM + half[None, :]
    first = tl.load(key, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(key + DIM // 2, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / DIM + eps)[:, None]
    gain = k_norms + layer * DIM + half
    first *= scale * tl.load(gain, mask=half_ok, other=0.0).to(tl.float32)[None, :]
    second *= scale * tl.load(gain + DIM // 2, mask=half_ok, other=0.0).to(tl.float32)[None, :]
    c = tl.load(cos + angle + half, mask=half_ok, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle + half, mask=half_ok, other=0.0).to(tl.float32)[None, :]
    kind = keys.dtype.element_ty
    to = keys + tl.load(offsets + layer) + slot // PAGE * page_stride + slot % PAGE * column_stride
    to = to + head.to(tl.int64)[:, None] * head_stride + half[None, :]
    tl.store(to, (first * c - second * s).to(kind), mask=ok)
    tl.store(to + DIM // 2, (second * c + first * s).to(kind), mask=ok)
    value = key + HEADS * DIM
    tl.store(to + value_offset, tl.load(value, mask=ok, other=0.0).to(kind), mask=ok)
    tl.store(to + value_offset + DIM // 2, tl.load(value + DIM // 2, mask=ok, other=0.0).to(kind), mask=ok)


def store_context(
    rows: Tensor, k_norms: Tensor, eps: float, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor,
    keys: Tensor, values: Tensor, offsets: Tensor,
) -> None:  # fmt: skip
    """Writes projected rows into the pages of L layers.

    Args:
        rows: [R, L * 2 * Hkv * D], per layer raw key rows, then value rows. k_norms: [L, D].
        cos, sin: [positions, D/2] rotation tables, equal strides; what lies beyond them is rotated as the last position.
        positions, slots: int64 [R] on the device. Slot s is column s % page of page s // page; rows of negative slots are left out.
        keys, values: [P, Hkv, page, D] of the first layer, views of one storage with equal strides and a contiguous last dimension.
        offsets: int64 [L] on the device, elements between the first layer's cache and each layer's; the layers' strides are the same.
    """
    heads, page, dim = keys.shape[1:]
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1
    beside = (values.data_ptr() - keys.data_ptr()) // keys.element_size()
    _store[(rows.shape[0], offsets.shape[0])](
        rows, k_norms, cos, sin, positions, slots, keys, offsets,
        cos.stride(0), cos.shape[0] - 1, rows.stride(0), *keys.stride()[:3], beside, eps,
        PAGE=page, HEADS=heads, DIM=dim, BH=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(dim // 2), num_warps=2,
    )  # fmt: skip
