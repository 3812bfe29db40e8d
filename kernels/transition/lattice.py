"""Transition scores, choices and walk in one launch, without a row of the head.

The head's products with a slot's own state follow from what the pass already has: the logits of the refined state h' = pre + s Wr z,

    <gamma * pre, W_j> = logits_j sqrt(|h'|^2 / d + eps) - s <z, A_j>

(s, A_j and G as in `kernel`). A group of slots of one sequence is shared by programs that take a part of m each; the last one to arrive
adds their parts in a fixed order, and the last group of a sequence walks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, prefetch, start_early, start_next, wait_previous
from torch import Tensor

PART = 128  # of m, per program
PAIRS = {False: 16, True: 64}  # rows of the products per program: few sequences, many
FEW = 4  # sequences
WARPS = 4
AHEAD = False


@triton.jit
def _messages(table, before, receiver_gate, state, at, ok, m, kind: tl.constexpr):
    """Gated messages of predecessors `before` [P] at message components `at`: [P, BM]."""
    row = table + before[:, None] * (2 * m) + at[None, :]
    message = tl.load(row, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(row + m, mask=ok, other=0.0).to(tl.float32)
    gate += tl.load(receiver_gate + state[:, None] * m + at[None, :], mask=ok, other=0.0)
    return (tl.sigmoid(gate) * message).to(kind)


@triton.jit
def _squares(parts, tiles, rows, state, TILES: tl.constexpr):
    tile = tl.arange(0, TILES)
    return tl.sum(tl.load(parts + tile[:, None] * rows + state[None, :], mask=(tile < tiles)[:, None], other=0.0), 0)


@triton.jit
def _choose(result, together, k, ok, heat, u, K2: tl.constexpr):
    """The index of the successor that each pair row chooses, [P], and the rows it is drawn from; result [P, P], blocks on the diagonal."""
    values = tl.where(ok[:, None], tl.where(together, result, float("-inf")), 0.0)
    peak = tl.max(values, 1)[:, None]
    greedy = tl.min(tl.where(values == peak, k[None, :], K2 - 1), 1)
    soft = tl.where(together, tl.exp((values - peak) / tl.where(heat > 0, heat, 1.0)), 0.0)
    soft = soft / tl.sum(soft, 1)[:, None]
    drawn = tl.sum(tl.where(together & (tl.cumsum(soft, 1) <= u[:, None]), 1, 0), 1)
    return tl.where(heat > 0, drawn, greedy), soft


@triton.jit
def _walk_words(
    words, candidate_ids, tokens, q, soft, heat, n, count, SLOTS: tl.constexpr, T2: tl.constexpr, K2: tl.constexpr
):
    """Follows the choices of one sequence; the choices of a slot are a word of 4 bits each, so a step is a shift."""
    rs, rk = tl.arange(0, T2), tl.arange(0, K2)
    index = tl.full((), 0, tl.int64)
    before, chosen = tl.zeros((T2,), tl.int64), tl.zeros((T2,), tl.int64)
    for slot in tl.static_range(SLOTS):
        before = tl.where(rs == slot, index, before)
        index = (tl.load(words + n * SLOTS + slot, cache_modifier=".cg") >> (index * 4)) & 15
        chosen = tl.where(rs == slot, index, chosen)
    row, row_ok, k_ok = n * SLOTS + rs, rs < SLOTS, rk < count
    tl.store(tokens + row, tl.load(candidate_ids + row * count + chosen, mask=row_ok, other=0), mask=row_ok)
    at = (row * count + before)[:, None] * count + rk[None, :]
    drawn_from = row_ok[:, None] & (rk < tl.where(heat > 0, count, 0))[None, :]
    drawn = tl.load(soft + at, mask=drawn_from, other=0.0, cache_modifier=".cg")
    one_hot = tl.where(rk[None, :] == chosen[:, None], 1.0, 0.0)
    to = q + row[:, None] * count + rk[None, :]
    tl.store(to, tl.where(heat > 0, drawn, one_hot), mask=row_ok[:, None] & k_ok[None, :])


@triton.jit
def _lattice(
    logits, squares_in, squares_written, pull, receiver_gate, z_last, anchor_ids, candidate_ids, token_table, score_table, gram,
    temperature, uniforms, partial, counters, words, choices, soft, scores, tokens, q,
    states, tiles, written_tiles, vocabulary, hidden, pull_stride, m, count, eps,
    SLOTS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr, K2: tl.constexpr, BM: tl.constexpr, TILES: tl.constexpr,
    WRITTEN_TILES: tl.constexpr, T2: tl.constexpr, WORDS: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    group, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start_early(PDL)
    pair, rm = tl.arange(0, P), tl.arange(0, BM)
    n = group // GROUPS
    slot, k = group % GROUPS * (P // K2) + pair // K2, pair % K2
    ok = (slot < SLOTS) & (k < count)
    slot = tl.minimum(slot, SLOTS - 1)
    row = n * SLOTS + slot
    state = n * (SLOTS + 1) + slot + 1
    mine = chunk * BM + rm
    if AHEAD and PDL:  # the matrix is nobody's output, and the head has swept it out of the L2 cache
        line = (group * chunks + chunk) * 128 + tl.arange(0, 128)
        prefetch(gram + line * 64, tl.where(line * 64 < m * m, 128, 0).to(tl.int32))
    wait_previous(PDL)
    anchor = tl.load(anchor_ids + n)
    own = tl.load(candidate_ids + row * count + k, mask=ok, other=0)
    before = tl.load(candidate_ids + (row - 1) * count + k, mask=ok & (slot > 0), other=0)
    before = tl.where(slot > 0, before, anchor)
    kind: tl.constexpr = gram.dtype.element_ty
    gram_z = tl.zeros((P, BM), tl.float32)
    for start in range(0, m, BM):
        inside = start + rm < m
        z = _messages(token_table, before, receiver_gate, state, start + rm, ok[:, None] & inside[None, :], m, kind)
        at = gram + (start + rm)[:, None] * m + mine[None, :]
        g = tl.load(at, mask=inside[:, None] & (mine < m)[None, :], other=0.0)
        gram_z = tl.dot(z, g, gram_z, input_precision=PRECISION)
    part_ok = ok[:, None] & (mine < m)[None, :]
    z = _messages(token_table, before, receiver_gate, state, mine, part_ok, m, kind)
    table = tl.load(score_table + own[:, None] * m + mine[None, :], mask=part_ok, other=0.0)
    products = tl.dot(z, tl.trans(table), input_precision=PRECISION)
    wide = z.to(tl.float32)
    pulled = tl.load(pull + state[:, None] * pull_stride + mine[None, :], mask=part_ok, other=0.0).to(tl.float32)
    last = tl.load(z_last + state[:, None] * m + mine[None, :], mask=part_ok, other=0.0).to(tl.float32)
    to = partial + (group * chunks + chunk) * (P * P + 3 * P)
    tl.store(to + pair[:, None] * P + pair[None, :], products)
    tl.store(to + P * P + pair, tl.sum(wide * pulled, 1))
    tl.store(to + P * P + P + pair, tl.sum(wide * gram_z, 1))
    tl.store(to + P * P + 2 * P + pair, tl.sum(last * table.to(tl.float32), 1))
    start_next(PDL)
    tl.debug_barrier()
    if tl.atomic_add(counters + group, 1, sem="acq_rel") != chunks - 1:
        return
    tl.store(counters + group, 0)
    products = tl.zeros((P, P), tl.float32)
    linear, quadratic, known = tl.zeros((P,), tl.float32), tl.zeros((P,), tl.float32), tl.zeros((P,), tl.float32)
    for c in range(chunks):
        part = partial + (group * chunks + c) * (P * P + 3 * P)
        products += tl.load(part + pair[:, None] * P + pair[None, :], cache_modifier=".cg")
        linear += tl.load(part + P * P + pair, cache_modifier=".cg")
        quadratic += tl.load(part + P * P + P + pair, cache_modifier=".cg")
        known += tl.load(part + P * P + 2 * P + pair, cache_modifier=".cg")
    squares = _squares(squares_in, tiles, states, state, TILES)
    written = _squares(squares_written, written_tiles, states, state, WRITTEN_TILES)
    scale = tl.sqrt(squares / hidden)
    heat, u = tl.load(temperature + n), tl.load(uniforms + row)
    base = tl.load(logits + state * vocabulary + own, mask=ok, other=0.0).to(tl.float32)
    base = base * tl.sqrt(written / hidden + eps) - scale * known
    refined = tl.maximum(squares + scale * (2.0 * linear + scale * quadratic), 0.0)
    result = (base[None, :] + scale[:, None] * products) * tl.rsqrt(refined / hidden + eps)[:, None]
    together = (pair // K2)[:, None] == (pair // K2)[None, :]
    square = (row * count + k)[:, None] * count + k[None, :]
    inside = together & ok[None, :]
    tl.store(scores + square, result, mask=inside & ok[:, None])
    choice, drawn = _choose(result, inside, k, ok, heat, u, K2)
    choice = tl.minimum(choice, count - 1)
    tl.store(soft + square, drawn, mask=inside & (ok & (k < tl.where(heat > 0, count, 0)))[:, None])
    if not WORDS:
        tl.store(choices + row * count + k, choice, mask=ok)
    else:
        slots = group % GROUPS * (P // K2) + tl.arange(0, P // K2)
        shifted = tl.where(k < count, choice.to(tl.int64) << (k.to(tl.int64) * 4), 0)
        tl.store(words + n * SLOTS + slots, tl.sum(tl.reshape(shifted, (P // K2, K2)), 1), mask=slots < SLOTS)
        tl.debug_barrier()
        if tl.atomic_add(counters + tl.num_programs(0) + n, 1, sem="acq_rel") == GROUPS - 1:
            tl.store(counters + tl.num_programs(0) + n, 0)
            _walk_words(words, candidate_ids, tokens, q, soft, heat, n, count, SLOTS, T2, K2)


@dataclass(frozen=True)
class LatticeScratch:
    """What programs leave each other, for N sequences of B-1 slots with K candidates.

    partial float32, counters int32 (zero between launches), words int64 [N*(B-1)] for K <= 16;
    choices int32 [N*(B-1), K] and soft float32 [N*(B-1), K, K] as for `walk_choices`.
    """

    pairs: int
    partial: Tensor
    counters: Tensor
    words: Tensor
    choices: Tensor
    soft: Tensor

    @classmethod
    def of(cls, batch: int, slots: int, count: int, m: int, device: torch.device) -> LatticeScratch:
        """Scratch on a device."""
        k2 = max(2, triton.next_power_of_2(count))
        pairs = max(PAIRS[batch > FEW], k2)
        groups = batch * triton.cdiv(slots, pairs // k2)
        return cls(
            pairs=pairs,
            partial=torch.empty(groups * triton.cdiv(m, PART), pairs * pairs + 3 * pairs, device=device),
            counters=torch.zeros(groups + batch, dtype=torch.int32, device=device),
            words=torch.zeros(batch * slots, dtype=torch.int64, device=device),
            choices=torch.zeros(batch * slots, count, dtype=torch.int32, device=device),
            soft=torch.empty(batch * slots, count, count, device=device),
        )


def walk_lattice(
    logits: Tensor, squares: Tensor, squares_written: Tensor, pull: Tensor, receiver_gate: Tensor, z: Tensor, anchor_ids: Tensor,
    candidate_ids: Tensor, token_table: Tensor, score_table: Tensor, gram: Tensor, hidden: int, eps: float, temperature: Tensor,
    uniforms: Tensor, scores: Tensor, tokens: Tensor, q: Tensor, scratch: LatticeScratch,
) -> None:  # fmt: skip
    """Scores of every (predecessor, successor) pair of adjacent candidates, and the walk through them.

    Args:
        logits: [N*B, V], unrefined. squares, squares_written: float32 [T, N*B], parts whose sums are |row|^2 of the last layer
            before and after its injection.
        pull: [N*B, m], Wr^T of the last layer before its injection; the row stride may be larger.
        receiver_gate: float32 [N*B, m], G_r phi + b; z: [N*B, m], the gated messages, both of the last layer.
        candidate_ids: int64 [N, B-1, K]; ids must lie in the vocabulary.
        token_table: [V, 2m]; score_table [V, m] and gram [m, m]: see `fold_scores`.
        hidden: d. temperature: float32 [N]; uniforms: float32 [N, B-1].
        scores: float32 [N, B-1, K, K]; tokens: int64 [N, B-1]; q: float32 [N, B-1, K]; written. With K > 16 the last two are left to
            `walk_choices`.
    """
    m, (batch, slots, count), states = gram.shape[0], candidate_ids.shape, z.shape[0]
    k2, pairs, wide = max(2, triton.next_power_of_2(count)), scratch.pairs, gram.element_size() == 4
    groups = triton.cdiv(slots, pairs // k2)
    _lattice[(batch * groups, triton.cdiv(m, PART))](
        logits, squares, squares_written, pull, receiver_gate, z, anchor_ids, candidate_ids, token_table, score_table, gram,
        temperature, uniforms, scratch.partial, scratch.counters, scratch.words, scratch.choices, scratch.soft, scores, tokens, q,
        states, squares.shape[0], squares_written.shape[0], logits.shape[1], hidden, pull.stride(0), m, count, eps,
        SLOTS=slots, GROUPS=groups, P=pairs, K2=k2, BM=PART, TILES=triton.next_power_of_2(squares.shape[0]),
        WRITTEN_TILES=triton.next_power_of_2(squares_written.shape[0]), T2=max(2, triton.next_power_of_2(slots)), WORDS=count <= 16,
        AHEAD=AHEAD and batch <= FEW and not wide and m * m % 64 == 0,
        PRECISION="ieee" if wide else "tf32", num_warps=WARPS, num_stages=1 if wide else 2, **dependent(_lattice, z),
    )  # fmt: skip
