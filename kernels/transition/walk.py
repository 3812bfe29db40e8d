"""The walk through the candidate lattice.

What every predecessor would choose is computed for all slots at once, by the kernel that scores them or one of its own; then one program
per sequence looks up one index per slot, from registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from torch import Tensor


@triton.jit
def store_choices(values, row, heat, u, choices, soft_out, count, K2: tl.constexpr):
    """The successor index that each of K predecessors chooses, and for heat > 0 the rows it is drawn from; values [K2, K2]."""
    rk = tl.arange(0, K2)
    ok = rk < count
    sampled = heat > 0
    values = tl.where(ok[None, :], values, float("-inf"))
    values = tl.where(ok[:, None], values, 0.0)  # rows of padding: anything finite
    peak = tl.max(values, 1)[:, None]
    greedy = tl.min(tl.where(values == peak, rk[None, :], K2 - 1), 1)
    soft = tl.where(ok[None, :], tl.exp((values - peak) / tl.where(sampled, heat, 1.0)), 0.0)
    soft = soft / tl.sum(soft, 1)[:, None]
    drawn = tl.sum(tl.where(ok[None, :] & (tl.cumsum(soft, 1) <= u), 1, 0), 1)
    choice = tl.minimum(tl.where(sampled, drawn, greedy), count - 1)
    tl.store(choices + row * count + rk, choice, mask=ok)
    at = row.to(tl.int64) * count * count + rk[:, None] * count + rk[None, :]
    tl.store(soft_out + at, soft, mask=ok[:, None] & (rk < tl.where(sampled, count, 0))[None, :])


@triton.jit
def _choose(scores, temperature, uniforms, choices, soft, slots, count, K2: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    start_early(PDL)
    rk = tl.arange(0, K2)
    ok = (rk < count)[:, None] & (rk < count)[None, :]
    wait_previous(PDL)
    at = row.to(tl.int64) * count * count + rk[:, None] * count + rk[None, :]
    values = tl.load(scores + at, mask=ok, other=0.0)
    heat, u = tl.load(temperature + row // slots), tl.load(uniforms + row)
    start_next(PDL)
    store_choices(values, row, heat, u, choices, soft, count, K2)


@triton.jit
def _walk(
    choices, soft, candidate_ids, temperature, tokens, q, slots, count, T2: tl.constexpr, K2: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    n = tl.program_id(0)
    start_early(PDL)
    rs, rk = tl.arange(0, T2), tl.arange(0, K2)
    row = n * slots + rs
    row_ok, k_ok = rs < slots, rk < count
    ok = row_ok[:, None] & k_ok[None, :]
    wait_previous(PDL)
    table = tl.load(choices + row[:, None] * count + rk[None, :], mask=ok, other=0)
    sampled = tl.load(temperature + n) > 0
    index = tl.full((), 0, tl.int32)
    before, chosen = tl.zeros((T2,), tl.int32), tl.zeros((T2,), tl.int32)
    for slot in range(slots):
        before = tl.where(rs == slot, index, before)
        here = (rs == slot)[:, None] & (rk == index)[None, :]
        index = tl.sum(tl.sum(tl.where(here, table, 0), 1), 0)
        chosen = tl.where(rs == slot, index, chosen)
    start_next(PDL)
    tl.store(tokens + row, tl.load(candidate_ids + row * count + chosen, mask=row_ok, other=0), mask=row_ok)
    at = (row * count + before).to(tl.int64)[:, None] * count + rk[None, :]
    drawn_from = tl.load(soft + at, mask=row_ok[:, None] & (rk < tl.where(sampled, count, 0))[None, :], other=0.0)
    one_hot = tl.where(rk[None, :] == chosen[:, None], 1.0, 0.0)
    tl.store(q + row[:, None] * count + rk[None, :], tl.where(sampled, drawn_from, one_hot), mask=ok)


def walk_choices(
    choices: Tensor, soft: Tensor, candidate_ids: Tensor, temperature: Tensor, tokens: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """The walk alone. choices int32 [N, B-1, K] and, where the temperature is positive, soft float32 [N, B-1, K, K] -> tokens, q"""
    batch, slots, count = candidate_ids.shape
    t2, k2 = triton.next_power_of_2(max(2, slots)), triton.next_power_of_2(max(2, count))
    _walk[(batch,)](
        choices, soft, candidate_ids, temperature, tokens, q, slots, count,
        T2=t2, K2=k2, num_warps=1 if t2 * k2 <= 512 else 4, **dependent(_walk, choices),
    )  # fmt: skip
    return tokens, q


def lattice_walk(
    scores: Tensor, candidate_ids: Tensor, temperature: Tensor, uniforms: Tensor, tokens: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """Greedy (temperature 0) or sampled walk; shapes as in the operator ``dspine::lattice_walk``. Allocates its scratch."""
    batch, slots, count = candidate_ids.shape
    choices, soft = torch.empty_like(candidate_ids, dtype=torch.int32), torch.empty_like(scores)
    k2 = triton.next_power_of_2(max(2, count))
    _choose[(batch * slots,)](
        scores, temperature, uniforms, choices, soft, slots, count, K2=k2, num_warps=4, **dependent(_choose, scores)
    )  # fmt: skip
    return walk_choices(choices, soft, candidate_ids, temperature, tokens, q)
