"""The last word on a shortlist: products of a row with the head rows of its shortlisted ids, and the best of them in order.

A shortlist may come from rounded weights: an id that belongs among the best only has to be on it somewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from dspine_kernels.topk.kernel import LOWEST, order_keys
from torch import Tensor


@triton.jit
def _rescore(
    rows, weight, shortlist, ids_out, width, shortlisted, count, block,
    S2: tl.constexpr, BD: tl.constexpr, LOWEST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    slot_row = tl.program_id(0).to(tl.int64)
    start_early(PDL)
    slots = block - 1
    row = rows + (slot_row // slots * block + slot_row % slots + 1) * width
    place, rd = tl.arange(0, S2), tl.arange(0, BD)
    listed = place < shortlisted
    wait_previous(PDL)
    ids = tl.load(shortlist + slot_row * shortlisted + place, mask=listed, other=0)
    acc = tl.zeros((S2,), tl.float32)
    for start in range(0, width, BD):
        at = start + rd
        inside = at < width
        x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight + ids[:, None] * width + at[None, :], mask=listed[:, None] & inside[None, :], other=0.0)
        acc += tl.sum(w.to(tl.float32) * x[None, :], 1)
    start_next(PDL)
    keys = tl.where(listed, order_keys(acc, ids), LOWEST)
    better = tl.sum(tl.where(keys[None, :] > keys[:, None], 1, 0), 1)
    tl.store(ids_out + slot_row * count + better, ids, mask=listed & (better < count))


def rescore(rows: Tensor, weight: Tensor, shortlist: Tensor, ids: Tensor, block: int) -> Tensor:
    """Writes the ids of the K largest products, descending, ties to the lower id, into `ids`.

    Args:
        rows: [N*B, d]; of every block of B rows the first is left out. weight: [V, d].
        shortlist: int64 [N*(B-1), S], different ids in any order, S >= K.
        ids: int64 [N*(B-1), K], written.

    Returns:
        ids.
    """
    (slots, listed), width = shortlist.shape, rows.shape[1]
    assert listed >= ids.shape[1]
    _rescore[(slots,)](
        rows, weight, shortlist, ids, width, listed, ids.shape[1], block,
        S2=triton.next_power_of_2(listed), BD=min(1024, triton.next_power_of_2(width)), LOWEST=LOWEST, num_warps=16,
        **dependent(_rescore, rows),
    )  # fmt: skip
    return ids
