"""The K best by their places: how many keys are larger than a key is its place, so nothing is sorted and no round waits for another.

A pyramid of four small sets: groups of blocks, the blocks of the K best groups, parts of the K best blocks, the elements of the K best
parts. The K largest elements of a set of parts lie in the K parts with the largest maxima.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import start_early, start_next, wait_previous
from dspine_kernels.topk.kernel import order_keys, source_row


@triton.jit
def _places(keys):
    """The number of larger keys, for each of distinct keys; the sum runs along the side that lies in registers."""
    return tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)


@triton.jit
def _leading(keys, K2: tl.constexpr, LOWEST: tl.constexpr):
    """Ids of the K2 largest keys, -1 where there are fewer."""
    ids = tl.where(keys != LOWEST, 0xFFFFFFFF - (keys & 0xFFFFFFFF), -1).to(tl.int32)
    here = _places(keys)[:, None] == tl.arange(0, K2)[None, :]
    return tl.max(tl.where(here, ids[:, None], -1), 0)


@triton.jit
def _select_by_place(
    logits, keys, ids_out, vocabulary, blocks, count, block,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, LOWEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start_early(PDL)
    at = tl.arange(0, WIDTH)
    wait_previous(PDL)
    packed = tl.load(keys + row * blocks + at, mask=at < blocks, other=LOWEST)
    best = _leading(tl.max(tl.reshape(packed, (WIDTH // GROUP, GROUP)), 1), K2, LOWEST)
    members = (best // (BLOCK * GROUP) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    packed = tl.load(keys + row * blocks + members, mask=(best >= 0)[:, None] & (members < blocks), other=LOWEST)
    best = _leading(tl.reshape(packed, (K2 * GROUP,)), K2, LOWEST)
    start_next(PDL)
    source = logits + source_row(row, block) * vocabulary
    ids = (best // BLOCK * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    inside = (best >= 0)[:, None] & (ids < vocabulary)
    packed = tl.where(inside, order_keys(tl.load(source + ids, mask=inside, other=0.0), ids), LOWEST)
    best = _leading(tl.max(tl.reshape(packed, (K2 * BLOCK // PART, PART)), 1), K2, LOWEST)
    ids = (best // PART * PART)[:, None] + tl.arange(0, PART)[None, :]
    inside = (best >= 0)[:, None] & (ids < vocabulary)
    packed = tl.where(inside, order_keys(tl.load(source + ids, mask=inside, other=0.0), ids), LOWEST)
    packed = tl.reshape(packed, (K2 * PART,))
    place = _places(packed)
    tl.store(
        ids_out + row * count + place, 0xFFFFFFFF - (packed & 0xFFFFFFFF), mask=(place < count) & (packed != LOWEST)
    )
