"""Copies what is committed and nothing else: a program past its sequence's length leaves at once, so the cache's size costs no bandwidth.

Page numbers beyond a sequence's length are never looked at; owners of such tables leave anything there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 8  # of one program; with 8 heads of 128 that is 16 KiB of bfloat16 keys


@triton.jit
def _copy(
    keys, values, pages, lengths, keys_out, values_out, page_count, page_size, capacity,
    page_stride, head_stride, column_stride, sequence_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    n, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.minimum(tl.load(lengths + n), capacity)
    if tile * COLUMNS >= length:
        return
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    committed = column < length
    page = tl.load(pages + n * page_count + column // page_size, mask=committed, other=0).to(tl.int64)
    element = tl.arange(0, WIDTH)
    head, dim = (element // DIM).to(tl.int64), element % DIM
    ok = committed[:, None] & (element < HEADS * DIM)[None, :]
    row = page * page_stride + (column % page_size).to(tl.int64) * column_stride
    source = row[:, None] + (head * head_stride + dim)[None, :]
    target = n * sequence_stride + column[:, None].to(tl.int64) * DIM + (head * capacity * DIM + dim)[None, :]
    tl.store(keys_out + target, tl.load(keys + source, mask=ok), mask=ok)
    tl.store(values_out + target, tl.load(values + source, mask=ok), mask=ok)


def copy_committed(
    keys: Tensor, values: Tensor, pages: Tensor, lengths: Tensor, keys_out: Tensor, values_out: Tensor
) -> None:
    """One layer's first lengths[n] columns of every sequence; columns beyond are left as they are.

    Args:
        keys, values: [P, Hkv, page, D], views with equal strides and a contiguous last dimension. A cache by slots is one with slots
            for pages: page = C.
        pages: int64 [N, ceil(C / page)], contiguous: column c of sequence n is in page pages[n, c // page].
        lengths: int64 [N] on the device; never read by the host. More than C is C.
        keys_out, values_out: [N, Hkv, C, D], written; contiguous within a sequence.
    """
    batch, heads, capacity, dim = keys_out.shape
    assert keys.stride() == values.stride()
    assert keys.stride(3) == pages.stride(1) == 1
    _copy[(batch, triton.cdiv(capacity, COLUMNS))](
        keys, values, pages, lengths, keys_out, values_out, pages.shape[1], keys.shape[2], capacity,
        keys.stride(0), keys.stride(1), keys.stride(2), keys_out.stride(0),
        HEADS=heads, DIM=dim, WIDTH=triton.next_power_of_2(heads * dim), COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
