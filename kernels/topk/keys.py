"""Keys of logits: 64 bits, order-preserving logit bits above and inverted id below, so all keys differ and ties need no care."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = -(1 << 63)


@triton.jit
def order_keys(values, ids):
    """64-bit keys that order like (value descending, id ascending)."""
    wide = values.to(tl.float32)
    bits = tl.where(wide == 0.0, 0.0, wide).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def source_row(row, block):
    """The row of logits: all rows, or every row but the first of each block of slots."""
    slots = tl.maximum(block - 1, 1)
    return tl.where(block > 0, row // slots * block + row % slots + 1, row)
