"""Exact selection: the largest key of every block of logits, by the kernel that makes the logits or one of its own, then the K best
blocks opened and searched.

Keys are 64 bits, order-preserving logit bits above and inverted id below, so all keys differ and ties need no care. The K largest
elements lie in the K blocks with the largest maxima: an element of any other block has K larger ones before it. torch.topk over a
vocabulary of 152 k is a known bottleneck of block drafters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from dspine_kernels.topk.keys import LOWEST, order_keys, source_row
from dspine_kernels.topk.words import select_by_word
from torch import Tensor

BLOCK = 128
BLOCKS_PER_PROGRAM = 16
GROUP = 16  # blocks
MAX_CANDIDATES = 64
# Of `words`: most candidates (one is found sooner by keys) and blocks, logits of a part.
WORD_CANDIDATES, WORD_BLOCKS, PART = 16, 4096, 16


def workspace_keys(rows: int, vocabulary: int) -> int:
    """Number of int64 keys that `top_candidates` leaves between its launches; `linear` leaves as many or fewer, at 32 logits a key more."""
    return rows * triton.cdiv(vocabulary, 32)


@triton.jit
def _block_maxima(
    logits, keys, vocabulary, blocks, block,
    BLOCK: tl.constexpr, PER: tl.constexpr, LOWEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start_early(PDL)
    index = tl.program_id(1) * PER + tl.arange(0, PER)
    ids = index[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = ids < vocabulary
    wait_previous(PDL)
    values = tl.load(logits + source_row(row, block) * vocabulary + ids, mask=inside, other=0.0)
    start_next(PDL)
    best = tl.max(tl.where(inside, order_keys(values, ids), LOWEST), 1)
    tl.store(keys + row * blocks + index, best, mask=index < blocks)


@triton.jit
def _largest(packed, count, K2: tl.constexpr, LOWEST: tl.constexpr):
    """The `count` largest of distinct keys in descending order, [K2]; a few rounds of maxima beat a sort."""
    best = tl.full((K2,), LOWEST, tl.int64)
    slot = tl.arange(0, K2)
    for index in range(count):
        top = tl.max(packed, 0)
        best = tl.where(slot == index, top, best)
        packed = tl.where(packed == top, LOWEST, packed)
    return best


@triton.jit
def _select(
    logits, keys, ids_out, vocabulary, blocks, count, block,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr, LOWEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start_early(PDL)
    at = tl.arange(0, WIDTH)
    wait_previous(PDL)
    packed = tl.load(keys + row * blocks + at, mask=at < blocks, other=LOWEST)
    # The same step twice: the K blocks with the largest maxima lie in the K groups of blocks with the largest maxima.
    groups = _largest(tl.max(tl.reshape(packed, (WIDTH // GROUP, GROUP)), 1), count, K2, LOWEST)
    of_group = (0xFFFFFFFF - (groups & 0xFFFFFFFF)) // (BLOCK * GROUP) * GROUP
    members = of_group[:, None] + tl.arange(0, GROUP)[None, :]
    inside = (groups != LOWEST)[:, None] & (members < blocks)
    packed = tl.load(keys + row * blocks + members, mask=inside, other=LOWEST)
    opened = _largest(tl.reshape(packed, (K2 * GROUP,)), count, K2, LOWEST)
    start_next(PDL)
    # A vocabulary smaller than K blocks leaves empty places; they open nothing.
    first = (0xFFFFFFFF - (opened & 0xFFFFFFFF)) // BLOCK * BLOCK
    ids = first[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = (opened != LOWEST)[:, None] & (ids < vocabulary)
    values = tl.load(logits + source_row(row, block) * vocabulary + ids, mask=inside, other=0.0)
    packed = tl.where(inside, order_keys(values, ids), LOWEST)
    best = _largest(tl.reshape(packed, (K2 * BLOCK,)), count, K2, LOWEST)
    slot = tl.arange(0, K2)
    tl.store(ids_out + row * count + slot, 0xFFFFFFFF - (best & 0xFFFFFFFF), mask=slot < count)


def top_candidates(logits: Tensor, ids: Tensor, keys: Tensor, block: int = 0) -> Tensor:
    """Writes the ids of the K largest logits into `ids`.

    Args:
        logits: [R, V] float32 or bfloat16, contiguous. -inf is allowed, NaN orders by its bits and never faults.
        ids: int64 [R, K], K <= 64, written.
        block: B > 0 leaves out the first of every B rows of logits (the anchors'), so that R = N*(B-1) for [N*B, V].
        keys: int64 scratch of at least `workspace_keys(R, V)` elements.

    Returns:
        ids.
    """
    vocabulary = logits.shape[1]
    rows = ids.shape[0]
    blocks = triton.cdiv(vocabulary, BLOCK)
    _block_maxima[(rows, triton.cdiv(blocks, BLOCKS_PER_PROGRAM))](
        logits, keys, vocabulary, blocks, block, BLOCK=BLOCK, PER=BLOCKS_PER_PROGRAM, LOWEST=LOWEST, num_warps=4,
        **dependent(_block_maxima, logits),
    )  # fmt: skip
    return select_candidates(logits, ids, keys, BLOCK, block)


def select_candidates(logits: Tensor, ids: Tensor, keys: Tensor, width: int, block: int = 0) -> Tensor:
    """As `top_candidates`, from the largest keys of every `width` (a power of two) logits: int64 [R, ceil(V / width)]."""
    vocabulary, (rows, count) = logits.shape[1], ids.shape
    padded, blocks = max(2, triton.next_power_of_2(count)), triton.cdiv(vocabulary, width)
    if 1 < count <= WORD_CANDIDATES and blocks <= WORD_BLOCKS:
        return select_of_shares(logits, ids, keys, width, block, shares=1, nothing=0)
    _select[(rows,)](
        logits, keys, ids, vocabulary, blocks, count, block,
        WIDTH=max(32, triton.next_power_of_2(blocks)), GROUP=GROUP, K2=padded, BLOCK=width, LOWEST=LOWEST,
        num_warps=4 if padded <= 16 else 8, **dependent(_select, logits),
    )  # fmt: skip
    return ids


def select_of_shares(
    logits: Tensor, ids: Tensor, keys: Tensor, width: int, block: int, *, shares: int, nothing: int
) -> Tensor:
    """As `select_candidates`, of every share for itself: block b of a row belongs to share b % shares. ids int64 [R, shares * K], K <= 16.

    nothing: the id of places that stay empty.
    """
    vocabulary, (rows, places) = logits.shape[1], ids.shape
    count, blocks = places // shares, triton.cdiv(vocabulary, width)
    assert count <= WORD_CANDIDATES
    groups = triton.cdiv(triton.cdiv(blocks, shares), GROUP)
    select_by_word[(rows, shares)](
        logits, keys, ids, vocabulary, blocks, count, block,
        GROUPS=max(32, triton.next_power_of_2(groups)), GROUP=GROUP, K2=max(2, triton.next_power_of_2(count)), BLOCK=width,
        PARTS=max(1, width // PART), PART=min(PART, width), SHARES=shares, NOTHING=nothing, LOWEST=LOWEST, num_warps=1,
        **dependent(select_by_word, logits),
    )  # fmt: skip
    return ids


def top_candidates_reference(logits: Tensor, count: int) -> Tensor:
    """Naive reference: a stable descending sort. [R, V] -> int64 [R, count]"""
    return torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :count]
