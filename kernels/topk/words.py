"""The K best in rounds of 32-bit maxima by one warp: values and ids apart, so that a round is two instructions of the whole warp and
nothing waits at a barrier.

The same steps as `kernel._select`, and the last one twice: groups of blocks, the blocks of the K best groups, parts of the K best blocks,
the elements of the K best parts. The K largest elements of a set of parts lie in the K parts with the largest maxima, whatever the parts:
those of groups and blocks are strided, so that their maxima are taken without a word between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import start_early, start_next, wait_previous
from dspine_kernels.topk.keys import order_keys, source_row


@triton.jit
def _best_of(packed, count, K2: tl.constexpr):
    """Ids of the `count` largest of distinct keys in descending order, [K2]; -1 where there are none."""
    least: tl.constexpr = -(1 << 31)
    values, ids = (packed >> 32).to(tl.int32), (0xFFFFFFFF - (packed & 0xFFFFFFFF)).to(tl.int32)
    best = tl.full((K2,), -1, tl.int32)
    place = tl.arange(0, K2)
    for index in range(count):
        top = tl.max(values, 0)
        first = tl.min(tl.where(values == top, ids, 0x7FFFFFFF), 0)
        best = tl.where(place == index, tl.where(top == least, -1, first), best)
        values = tl.where(ids == first, least, values)
    return best


@triton.jit
def select_by_word(
    logits, keys, ids_out, vocabulary, blocks, count, block,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    SHARES: tl.constexpr, NOTHING: tl.constexpr, LOWEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`kernel.select_candidates` of every SHARES-th block of one row. Logits fall into PARTS strided parts of PART each in every block of
    BLOCK. NOTHING: the id of an empty place.
    """
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start_early(PDL)
    source, of_row = logits + source_row(row, block) * vocabulary, keys + row * blocks
    group, part = tl.arange(0, GROUPS), tl.arange(0, PARTS)
    in_group, in_part = tl.arange(0, GROUP), tl.arange(0, PART)
    wait_previous(PDL)
    largest = tl.full((GROUPS,), LOWEST, tl.int64)
    for member in tl.static_range(GROUP):
        at = (member * GROUPS + group) * SHARES + share
        largest = tl.maximum(largest, tl.load(of_row + at, mask=at < blocks, other=LOWEST))
    best = _best_of(largest, count, K2)
    at = ((best // BLOCK // SHARES % GROUPS)[:, None] + in_group[None, :] * GROUPS) * SHARES + share
    packed = tl.load(of_row + at, mask=(best >= 0)[:, None] & (at < blocks), other=LOWEST)
    best = _best_of(tl.reshape(packed, (K2 * GROUP,)), count, K2)
    largest = tl.full((K2, PARTS), LOWEST, tl.int64)
    for member in tl.static_range(PART):
        ids = (best // BLOCK * BLOCK)[:, None] + member * PARTS + part[None, :]
        inside = (best >= 0)[:, None] & (ids < vocabulary)
        values = tl.load(source + ids, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.where(inside, order_keys(values, ids), LOWEST))
    best = _best_of(tl.reshape(largest, (K2 * PARTS,)), count, K2)
    ids = (best - best % BLOCK + best % PARTS)[:, None] + in_part[None, :] * PARTS
    inside = (best >= 0)[:, None] & (ids < vocabulary)
    packed = tl.where(inside, order_keys(tl.load(source + ids, mask=inside, other=0.0), ids), LOWEST)
    best = _best_of(tl.reshape(packed, (K2 * PART,)), count, K2)
    start_next(PDL)
    place = tl.arange(0, K2)
    at = (row * SHARES + share) * count + place
    tl.store(ids_out + at, tl.maximum(best, NOTHING).to(tl.int64), mask=place < count)
