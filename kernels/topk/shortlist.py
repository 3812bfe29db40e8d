"""A shortlist of a row's largest logits, and the last word on it.

The logits may come from rounded weights: an id that belongs among the best only has to be on the list somewhere. So the list is drawn
up in no order and by parts, each of which keeps as many as are wanted of the whole: a round finds one of every part at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from dspine_kernels.topk.keys import LOWEST, order_keys, source_row
from torch import Tensor

TILE = 128
TILE_PARTS, PARTS = 4, 2  # of the tiles, and of the logits of the tiles that are opened
EACH = 16  # kept of every part
SHORTLIST = PARTS * EACH
# Launches: tiles of a program and its warps, warps, depth of a step with warps and buffered steps.
MAXIMA, LIST_WARPS, RESCORE = (16, 4), 8, (256, 4, 4)


@triton.jit
def _tile_maxima(
    logits, keys, vocabulary, tiles, block,
    TILE: tl.constexpr, PER: tl.constexpr, LOWEST: tl.constexpr, PDL: tl.constexpr,
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
    peak = tl.max(values, 1)
    # One 64-bit key a tile, not one a logit. A tile of NaN finds no id and is never opened.
    first = tl.min(tl.where(inside & (values == peak[:, None]), ids, vocabulary), 1)
    tl.store(
        keys + row * tiles + tile, tl.where(first < vocabulary, order_keys(peak, first), LOWEST), mask=tile < tiles
    )


@triton.jit
def _best_of_parts(packed, PARTS: tl.constexpr, EACH: tl.constexpr, LOWEST: tl.constexpr):
    """The EACH largest of every part of distinct keys [PARTS, n], flat."""
    best = tl.full((PARTS, EACH), LOWEST, tl.int64)
    place = tl.arange(0, EACH)[None, :]
    for index in range(EACH):
        top = tl.max(packed, 1)[:, None]
        best = tl.where(place == index, top, best)
        packed = tl.where(packed == top, LOWEST, packed)
    return tl.reshape(best, (PARTS * EACH,))


@triton.jit
def _shortlist(
    logits, keys, ids_out, vocabulary, tiles, block,
    WIDTH: tl.constexpr, TILE: tl.constexpr, TILE_PARTS: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr, LOWEST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start_early(PDL)
    # Neighbours lie in different parts: what is likely under similar contexts often has neighbouring ids.
    at = tl.arange(0, WIDTH // TILE_PARTS)[None, :] * TILE_PARTS + tl.arange(0, TILE_PARTS)[:, None]
    wait_previous(PDL)
    packed = tl.load(keys + row * tiles + at, mask=at < tiles, other=LOWEST)
    opened = _best_of_parts(packed, TILE_PARTS, EACH, LOWEST)
    first = (0xFFFFFFFF - (opened & 0xFFFFFFFF)) // TILE * TILE
    ids = first[:, None] + tl.arange(0, TILE)[None, :]
    inside = (opened != LOWEST)[:, None] & (ids < vocabulary)
    values = tl.load(logits + source_row(row, block) * vocabulary + ids, mask=inside, other=0.0)
    start_next(PDL)
    packed = tl.where(inside, order_keys(values, ids), LOWEST)
    best = _best_of_parts(tl.reshape(packed, (PARTS, TILE_PARTS * EACH * TILE // PARTS)), PARTS, EACH, LOWEST)
    listed = tl.where(best == LOWEST, -1, 0xFFFFFFFF - (best & 0xFFFFFFFF))
    tl.store(ids_out + row * (PARTS * EACH) + tl.arange(0, PARTS * EACH), listed)


def shortlist(logits: Tensor, ids: Tensor, block: int, keys: Tensor | None = None) -> Tensor:
    """Writes the ids of at least the `EACH` largest logits of every row, and as many more, into `ids`; -1 where there are no more.

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
            logits, keys, vocabulary, tiles, block, TILE=TILE, PER=per, LOWEST=LOWEST, num_warps=warps,
            **dependent(_tile_maxima, logits),
        )  # fmt: skip
    _shortlist[(slots,)](
        logits, keys, ids, vocabulary, tiles, block, WIDTH=max(EACH * TILE_PARTS, triton.next_power_of_2(tiles)), TILE=TILE,
        TILE_PARTS=TILE_PARTS, PARTS=PARTS, EACH=EACH, LOWEST=LOWEST, num_warps=LIST_WARPS, **dependent(_shortlist, logits),
    )  # fmt: skip
    return ids


@triton.jit
def _rescore(
    rows, weight, shortlist, ids_out, width, vocabulary, listed, count, block,
    S2: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr, LOWEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot_row = tl.program_id(0).to(tl.int64)
    start_early(PDL)
    place, rd, narrow = tl.arange(0, S2), tl.arange(0, BD), tl.arange(0, 16)
    row = rows + source_row(slot_row, block) * width
    wait_previous(PDL)
    ids = tl.load(shortlist + slot_row * listed + place, mask=place < listed, other=-1)
    there = ids >= 0
    weight_at = weight + tl.maximum(ids, 0)[:, None] * width + rd[None, :]
    # The matrix unit's narrowest side is sixteen columns, of which one is used: its pipeline is what hides the memory's latency.
    row_at = row + rd[:, None] + narrow[None, :] * 0
    acc = tl.zeros((S2, 16), tl.float32)
    for start in range(0, width, BD):
        inside = start + rd < width
        w = tl.load(weight_at + start, mask=inside[None, :], other=0.0)
        x = tl.load(row_at + start, mask=inside[:, None] & (narrow == 0)[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision=PRECISION)
    start_next(PDL)
    # Empty places hold some id of the vocabulary, behind all others: of a row of NaN nothing is listed, and its ids are looked up too.
    keys = tl.where(there, order_keys(tl.sum(acc, 1), ids), LOWEST + place.to(tl.int64))
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
    wide, (depth, warps, stages) = rows.element_size() == 4, RESCORE
    _rescore[(slots,)](
        rows, weight, shortlist, ids, width, weight.shape[0], listed, ids.shape[1], block,
        S2=max(16, triton.next_power_of_2(listed)), BD=64 if wide else depth, PRECISION="ieee" if wide else "tf32", LOWEST=LOWEST,
        num_warps=warps, num_stages=1 if wide else stages, **dependent(_rescore, rows),
    )  # fmt: skip
    return ids
