"""Candidates of few rows and what the transition reads of them in one launch: whoever chooses a slot's candidates has their ids at hand.

A slot's candidates are the predecessors of the next slot and the successors of its own, so their messages go to the next slot's rows
and their products with the head to the slot's own. The programs of a slot, which share its messages and products by columns, choose alike.
"""

from __future__ import annotations

import triton
import triton.language as tl
from dspine_kernels.dependent import dependent, start_early, start_next, wait_previous
from dspine_kernels.topk.kernel import by_word, word_sizes
from dspine_kernels.topk.keys import source_row
from dspine_kernels.topk.words import best_ids
from dspine_kernels.transition.kernel import TransitionScratch, hidden_part
from torch import Tensor


@triton.jit
def _choose_candidates(
    logits, keys, ids_out, pre, receiver_gate, anchor_ids, table, norm_weight, lm_head, z, unary,
    vocabulary, blocks, count, block, m, hidden, part,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, K2: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
    LOWEST: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start_early(PDL)
    slots = block - 1
    n, slot = row // slots, row % slots
    state = n * block + slot + 1
    rk, rm, rd = tl.arange(0, K2), chunk * BM + tl.arange(0, BM), tl.arange(0, BD)
    k_ok, m_ok = rk < count, rm < m
    # All but logits and keys is older than the kernel before, which made them and has waited for it.
    anchor = tl.load(anchor_ids + n).to(tl.int64)
    next_ok, first_ok = rm < tl.where(slot + 1 < slots, m, 0), rm < tl.where(slot == 0, m, 0)
    own_gate = tl.load(receiver_gate + state * m + rm, mask=m_ok, other=0.0, cache_modifier=".cg")
    next_gate = tl.load(receiver_gate + (state + 1) * m + rm, mask=next_ok, other=0.0, cache_modifier=".cg")
    known = table + anchor * (2 * m) + rm
    first_message = tl.load(known, mask=first_ok, other=0.0).to(tl.float32)
    first_gate = tl.load(known + m, mask=first_ok, other=0.0).to(tl.float32) + own_gate
    wait_previous(PDL)
    source, of_row = logits + source_row(row, block) * vocabulary, keys + row * blocks
    best = best_ids(source, of_row, vocabulary, blocks, count, GROUPS, GROUP, K2, BLOCK, PARTS, PART, LOWEST)
    ids = tl.maximum(best, 0).to(tl.int64)
    at = table + ids[:, None] * (2 * m) + rm[None, :]
    ok = k_ok[:, None] & next_ok[None, :]
    message = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    gate = tl.load(at + m, mask=ok, other=0.0).to(tl.float32) + next_gate[None, :]
    products = tl.zeros((K2,), tl.float32)
    for start in range(chunk * part, tl.minimum((chunk + 1) * part, hidden), BD):
        d = start + rd
        d_ok = d < tl.minimum((chunk + 1) * part, hidden)
        gain = tl.load(norm_weight + d, mask=d_ok, other=0.0).to(tl.float32)
        base = tl.load(pre + state * hidden + d, mask=d_ok, other=0.0).to(tl.float32) * gain
        heads = tl.load(lm_head + ids[:, None] * hidden + d[None, :], mask=k_ok[:, None] & d_ok[None, :], other=0.0)
        products += tl.sum(heads.to(tl.float32) * base[None, :], 1)
    start_next(PDL)
    kind = z.dtype.element_ty
    own = z + (row * count + rk)[:, None] * m + rm[None, :]
    tl.store(own + count * m, (tl.sigmoid(gate) * message).to(kind), mask=ok)
    anchored = tl.zeros((K2, 1), tl.float32) + (tl.sigmoid(first_gate) * first_message)[None, :]
    tl.store(own, anchored.to(kind), mask=k_ok[:, None] & first_ok[None, :])
    tl.store(unary + (row * tl.num_programs(1) + chunk) * count + rk, products, mask=k_ok)
    tl.store(ids_out + row * count + rk, ids, mask=rk < tl.where(chunk == 0, count, 0))


def can_choose(count: int, vocabulary: int, width: int) -> bool:
    """Whether `choose_candidates` takes that many candidates and blocks."""
    return by_word(count, vocabulary, width)


def choose_candidates(
    logits: Tensor, keys: Tensor, width: int, candidate_ids: Tensor, pre: Tensor, receiver_gate: Tensor, anchor_ids: Tensor,
    token_table: Tensor, norm_weight: Tensor, lm_head: Tensor, scratch: TransitionScratch, block: int,
) -> None:  # fmt: skip
    """`topk.select_candidates` into candidate_ids, and `kernel.candidate_messages` of them.

    Args:
        logits: [N*B, V]; keys: int64 [N*(B-1), ceil(V / width)], the largest of every `width` logits.
        candidate_ids: int64 [N, B-1, K], written. The others as of `transition_scores`; none is written by the kernel before but
            logits and keys.
    """
    m, hidden = token_table.shape[1] // 2, pre.shape[1]
    batch, slots, count = candidate_ids.shape
    rows, vocabulary, parts = batch * slots, logits.shape[1], scratch.unary.shape[1]
    part = hidden_part(hidden, parts)
    _choose_candidates[(rows, parts)](
        logits, keys, candidate_ids, pre, receiver_gate, anchor_ids, token_table, norm_weight, lm_head, scratch.z, scratch.unary,
        vocabulary, triton.cdiv(vocabulary, width), count, block, m, hidden, part, **word_sizes(count, vocabulary, width),
        BM=triton.next_power_of_2(triton.cdiv(m, parts)), BD=min(512, triton.next_power_of_2(part)), num_warps=1,
        **dependent(_choose_candidates, logits),
    )  # fmt: skip
