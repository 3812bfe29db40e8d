"""A shortlist of a row's largest logits, and the last word on it.

The logits may come from rounded weights: an id that belongs among the best only has to be on the list somewhere. So the list is drawn
up in no order and by shares of the vocabulary, each of which gives as many as are wanted of the whole.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from dspine_kernels.device import stages_that_fit
from dspine_kernels.topk.kernel import select_of_shares
from dspine_kernels.topk.keys import LOWEST, order_keys, source_row
from torch import Tensor

TILE = 128
# Neighbouring tiles lie in different shares: what is likely under similar contexts often has neighbouring ids.
SHARES, EACH = 2, 16
SHORTLIST = SHARES * EACH
# Launches: tiles of a program and its warps; depth of a step, warps, buffered steps.
MAXIMA, RESCORE = (64, 4), (256, 4, 4)


@triton.jit
def _tile_maxima(
    logits, keys, vocabulary, tiles, block,
    TILE: tl.constexpr, PER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start_early(PDL)
    tile = tl.program_id(1) * PER + tl.arange(0, PER)
    ids = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = ids < vocabulary
    wait_previous(PDL)
    values = tl.load(logits + source_row(row, block) * vocabulary + ids, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    start_next(PDL)
    # One 64-bit key a tile, not one a logit; any id tells the tile.
    tl.store(keys + row * tiles + tile, order_keys(tl.max(values, 1), tile * TILE), mask=tile < tiles)


def shortlist(logits: Tensor, ids: Tensor, block: int, keys: Tensor | None = None) -> Tensor:
    """Writes the ids of at least the `EACH` largest logits of every row, and as many more, into `ids`; -1 where a share has no more.

    Args:
        logits: [N*B, V] float32 or bfloat16; of every block of B rows the first is left out.
        ids: int64 [N*(B-1), SHORTLIST], written.
        keys: int64 [N*(B-1), ceil(V / TILE)], the largest key of every tile of logits; None: found by a launch of its own.

    Returns:
        ids.
    """
    slots, vocabulary = ids.shape[0], logits.shape[1]
    tiles = triton.cdiv(vocabulary, TILE)
    if keys is None:
        per, warps = MAXIMA
        keys = torch.empty(slots, tiles, dtype=torch.int64, device=logits.device)
        _tile_maxima[(slots, triton.cdiv(tiles, per))](
            logits, keys, vocabulary, tiles, block, TILE=TILE, PER=per, num_warps=warps,
            **dependent(_tile_maxima, logits),
        )  # fmt: skip
    return select_of_shares(logits, ids, keys, TILE, block, shares=SHARES, nothing=-1)


@triton.jit
def _rescore(
    rows, weight, shortlist, ids_out, width, vocabulary, listed, count, block,
    S2: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, LOWEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot_row = tl.program_id(0).to(tl.int64)
    start_early(PDL)
    place, rd = tl.arange(0, S2), tl.arange(0, BD)
    row = rows + source_row(slot_row, block) * width
    wait_previous(PDL)
    ids = tl.load(shortlist + slot_row * listed + place, mask=place < listed, other=-1)
    there = ids >= 0
    weight_at = weight + tl.maximum(ids, 0)[:, None] * width + rd[None, :]
    score = tl.zeros((S2,), tl.float32)
    for start in tl.range(0, width, BD, num_stages=STAGES):
        inside = start + rd < width
        w = tl.load(weight_at + start, mask=inside[None, :], other=0.0)
        x = tl.load(row + start + rd, mask=inside, other=0.0)
        score += tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)
    start_next(PDL)
    # Empty places hold some id of the vocabulary, behind all others: a short vocabulary lists fewer, and their ids are looked up too.
    keys = tl.where(there, order_keys(score, ids), LOWEST + place.to(tl.int64))
    better = tl.sum(tl.where(keys[None, :] > keys[:, None], 1, 0), 1)
    ids = tl.where(there, ids, tl.minimum(place, vocabulary - 1))
    tl.store(ids_out + slot_row * count + better, ids, mask=better < count)


def rescore(rows: Tensor, weight: Tensor, shortlist: Tensor, ids: Tensor, block: int) -> Tensor:
    """Writes the ids of the K largest products, descending, ties to the lower id, into `ids`.

    Args:
        rows: [N*B, d]; of every block of B rows the first is left out. weight: [V, d].
        shortlist: int64 [N*(B-1), S], different ids in any order, S >= K; negative ones are passed over.
        ids: int64 [N*(B-1), K], written; any ids of the vocabulary where fewer than K are listed.

    Returns:
        ids.
    """
    (slots, listed), width = shortlist.shape, rows.shape[1]
    assert listed >= ids.shape[1]
    depth, warps, stages = RESCORE
    most, step = triton.next_power_of_2(listed), min(depth, triton.next_power_of_2(width))
    stages = stages_that_fit(rows.device, stages, (most + 1) * step * rows.element_size())
    _rescore[(slots,)](
        rows, weight, shortlist, ids, width, weight.shape[0], listed, ids.shape[1], block,
        S2=most, BD=step, STAGES=stages, LOWEST=LOWEST,
        num_warps=warps, **dependent(_rescore, rows),
    )  # fmt: skip
    return ids
