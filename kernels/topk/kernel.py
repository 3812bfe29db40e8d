"""Exact selection in two launches: the largest key of every block of logits, then the K best blocks opened and searched.

Keys are 64 bits, order-preserving logit bits above and inverted id below, so all keys differ and ties need no care. The K largest
elements lie in the K blocks with the largest maxima: an element of any other block has K larger ones before it. torch.topk over a
vocabulary of 152 k is a known bottleneck of block drafters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
BLOCKS_PER_PROGRAM = 16
MAX_CANDIDATES = 64
_LOWEST = -(1 << 63)


def workspace_keys(rows: int, vocabulary: int, count: int) -> int:
    """Number of int64 keys the first launch leaves for the second."""
    del count
    return rows * triton.cdiv(vocabulary, BLOCK)


@triton.jit
def _keys(values, ids):
    wide = values.to(tl.float32)
    bits = tl.where(wide == 0.0, 0.0, wide).to(tl.int32, bitcast=True)  # -0.0 ties with 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def _source_row(row, block):
    """The row of logits: all rows, or every row but the first of each block of slots."""
    slots = tl.maximum(block - 1, 1)
    return tl.where(block > 0, row // slots * block + row % slots + 1, row)


@triton.jit
def _block_maxima(
    logits, keys, vocabulary, blocks, block,
    BLOCK: tl.constexpr, PER: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * PER + tl.arange(0, PER)
    ids = index[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = ids < vocabulary
    values = tl.load(logits + _source_row(row, block) * vocabulary + ids, mask=inside, other=0.0)
    best = tl.max(tl.where(inside, _keys(values, ids), LOWEST), 1)
    tl.store(keys + row * blocks + index, best, mask=index < blocks)


@triton.jit
def _select(
    logits, keys, ids_out, vocabulary, blocks, count, block,
    WIDTH: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    packed = tl.load(keys + row * blocks + at, mask=at < blocks, other=LOWEST)
    opened = tl.topk(packed, K2)
    # A vocabulary smaller than K2 blocks leaves empty places; they open nothing.
    first = (0xFFFFFFFF - (opened & 0xFFFFFFFF)) // BLOCK * BLOCK
    ids = first[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = (opened != LOWEST)[:, None] & (ids < vocabulary)
    values = tl.load(logits + _source_row(row, block) * vocabulary + ids, mask=inside, other=0.0)
    packed = tl.where(inside, _keys(values, ids), LOWEST)
    best = tl.topk(tl.reshape(packed, (K2 * BLOCK,)), K2)
    slot = tl.arange(0, K2)
    tl.store(ids_out + row * count + slot, 0xFFFFFFFF - (best & 0xFFFFFFFF), mask=slot < count)


def top_candidates(logits: Tensor, ids: Tensor, keys: Tensor, block: int = 0) -> Tensor:
    """Writes the ids of the K largest logits into `ids`.

    Args:
        logits: [R, V] float32 or bfloat16, contiguous. -inf is allowed, NaN orders by its bits and never faults.
        ids: int64 [R, K], K <= 64, written.
        block: B > 0 leaves out the first of every B rows of logits (the anchors'), so that R = N*(B-1) for [N*B, V].
        keys: int64 scratch of at least `workspace_keys(R, V, K)` elements.

    Returns:
        ids.
    """
    vocabulary = logits.shape[1]
    rows, count = ids.shape
    padded = max(2, triton.next_power_of_2(count))
    blocks = triton.cdiv(vocabulary, BLOCK)
    _block_maxima[(rows, triton.cdiv(blocks, BLOCKS_PER_PROGRAM))](
        logits, keys, vocabulary, blocks, block, BLOCK=BLOCK, PER=BLOCKS_PER_PROGRAM, LOWEST=_LOWEST, num_warps=4
    )  # fmt: skip
    width = max(padded, triton.next_power_of_2(blocks))
    _select[(rows,)](
        logits, keys, ids, vocabulary, blocks, count, block,
        WIDTH=width, K2=padded, BLOCK=BLOCK, LOWEST=_LOWEST, num_warps=8,
    )  # fmt: skip
    return ids


def top_candidates_reference(logits: Tensor, count: int) -> Tensor:
    """Naive reference: a stable descending sort. [R, V] -> int64 [R, count]"""
    return torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :count]
