"""The walk through the candidate lattice: one program per sequence.

What every predecessor would choose is computed for a whole slot at once, from loads that do not depend on the walk; only the look-up
of one index is serial.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_next, wait_previous
from torch import Tensor


@triton.jit
def _walk(
    scores,
    candidate_ids,
    temperature,
    uniforms,
    tokens,
    q,
    slots,
    count,
    K2: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0)
    start_next(PDL)
    wait_previous(PDL)
    rk = tl.arange(0, K2)
    ok = rk < count
    both = ok[:, None] & ok[None, :]
    heat = tl.load(temperature + n)
    sampled = heat > 0
    divisor = tl.where(sampled, heat, 1.0)
    index = tl.full((), 0, tl.int32)
    for slot in tl.range(0, slots, num_stages=STAGES):
        row = n * slots + slot
        at = row.to(tl.int64) * count * count + rk[:, None] * count + rk[None, :]
        values = tl.load(scores + at, mask=both, other=float("-inf"))
        ids = tl.load(candidate_ids + row * count + rk, mask=ok, other=0)
        u = tl.load(uniforms + row)
        values = tl.where(ok[:, None], values, tl.where(ok, 0.0, float("-inf"))[None, :])
        peak = tl.max(values, 1)[:, None]
        greedy = tl.min(tl.where(values == peak, rk[None, :], K2 - 1), 1)
        soft = tl.where(ok[None, :], tl.exp((values - peak) / divisor), 0.0)
        soft = soft / tl.sum(soft, 1)[:, None]
        drawn = tl.sum(tl.where(ok[None, :] & (tl.cumsum(soft, 1) <= u), 1, 0), 1)
        choice = tl.minimum(tl.where(sampled, drawn, greedy), count - 1)
        here = rk == index
        row_q = tl.sum(tl.where(here[:, None], soft, 0.0), 0)
        index = tl.sum(tl.where(here, choice, 0), 0)
        tl.store(tokens + row, tl.sum(tl.where(rk == index, ids, 0), 0))
        tl.store(q + row * count + rk, tl.where(sampled, row_q, tl.where(rk == index, 1.0, 0.0)), mask=ok)


def lattice_walk(
    scores: Tensor, candidate_ids: Tensor, temperature: Tensor, uniforms: Tensor, tokens: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """Greedy (temperature 0) or sampled walk; shapes as in the operator ``dspine::lattice_walk``."""
    batch, slots, count = candidate_ids.shape
    k2 = triton.next_power_of_2(max(2, count))
    _walk[(batch,)](
        scores, candidate_ids, temperature, uniforms, tokens, q, slots, count,
        K2=k2, STAGES=3, num_warps=1 if k2 <= 16 else 4, **dependent(_walk, scores),
    )  # fmt: skip
    return tokens, q
