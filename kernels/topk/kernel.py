"""Two passes of bitonic selection over 64-bit keys: order-preserving logit bits above, inverted id below, so ties need no care.

torch.topk over a vocabulary of 152 k is a known bottleneck of block drafters: it sorts where only 16 of each row are wanted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 2048
MAX_CANDIDATES = 64
_LOWEST = -(1 << 63)


def workspace_keys(rows: int, vocabulary: int, count: int) -> int:
    """Number of int64 keys the first pass leaves for the second."""
    return rows * triton.cdiv(vocabulary, CHUNK) * max(2, triton.next_power_of_2(count))


@triton.jit
def _keys(values, ids):
    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def _select_chunks(
    logits, keys, vocabulary, chunks, block, CHUNK: tl.constexpr, K2: tl.constexpr, LOWEST: tl.constexpr
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slots = block - 1
    source = tl.where(block > 0, row // tl.maximum(slots, 1) * block + row % tl.maximum(slots, 1) + 1, row)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocabulary
    values = tl.load(logits + source * vocabulary + ids, mask=inside, other=0.0)
    packed = tl.where(inside, _keys(values, ids), LOWEST)
    best = tl.topk(packed, K2)
    tl.store(keys + (row * chunks + chunk) * K2 + tl.arange(0, K2), best)


@triton.jit
def _select_rows(keys, ids_out, total, count, WIDTH: tl.constexpr, K2: tl.constexpr, LOWEST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    packed = tl.load(keys + row * total + at, mask=at < total, other=LOWEST)
    best = tl.topk(packed, K2)
    ids = 0xFFFFFFFF - (best & 0xFFFFFFFF)
    slot = tl.arange(0, K2)
    tl.store(ids_out + row * count + slot, ids, mask=slot < count)


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
    chunks = triton.cdiv(vocabulary, CHUNK)
    total = chunks * padded
    _select_chunks[(rows, chunks)](
        logits, keys, vocabulary, chunks, block, CHUNK=CHUNK, K2=padded, LOWEST=_LOWEST, num_warps=4
    )
    width = triton.next_power_of_2(total)
    _select_rows[(rows,)](keys, ids, total, count, WIDTH=width, K2=padded, LOWEST=_LOWEST, num_warps=4)
    return ids


def top_candidates_reference(logits: Tensor, count: int) -> Tensor:
    """Naive reference: a stable descending sort. [R, V] -> int64 [R, count]"""
    return torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :count]
