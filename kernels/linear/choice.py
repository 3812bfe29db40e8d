"""Plans of skinny products, by shape and rows; measured on an H200 by whole draft passes (tools/bench_draft.py)."""

from __future__ import annotations

from dataclasses import replace

import triton
from dspine_kernels.dependent import EARLY, NOT
from dspine_kernels.linear.kernel import Plan

FEW_ROWS = 64  # most rows of two-byte values for which these products beat the vendor's
FEW_NARROW_ROWS = 16  # the same by float8 weights: more rows are rounded sooner than the weights are widened
PROGRAMS = 128  # about one a multiprocessor: further shares of the depth cost more than they hide
# Up to 16 rows of bfloat16: columns, depth -> plan.
MEASURED: dict[tuple[int, int], Plan] = {
    (6144, 4096): Plan(64, 16, 128, 1, 4, 6),
    (12288, 4096): Plan(32, 16, 128, 1, 2, 4),
    (4096, 12288): Plan(64, 16, 128, 2, 4, 5),
    (151936, 4096): Plan(128, 16, 128, 1, 4, 3),
    (2560, 4096): Plan(64, 16, 128, 3, 4, 6),
    (3072, 4096): Plan(64, 16, 128, 3, 4, 4),
    (4096, 512): Plan(16, 16, 512, 1, 2, 1, lead=1, start=EARLY),
    (10240, 512): Plan(64, 16, 128, 1, 4, 4),
}
# The same of a product on a stream beside another's.
BESIDE: dict[tuple[int, int], Plan] = {(6144, 4096): Plan(64, 16, 128, 1, 4, 4)}
# Up to 16 rows of bfloat16 by float8 weights, which are widened.
NARROW: dict[tuple[int, int], Plan] = {
    (6144, 4096): Plan(32, 16, 128, 3, 2, 3),
    (12288, 4096): Plan(32, 16, 128, 1, 2, 6),
    (4096, 12288): Plan(32, 16, 256, 4, 2, 3),
    (4096, 4096): Plan(32, 16, 256, 2, 2, 6),
    (151936, 4096): Plan(64, 16, 256, 1, 2, 3),
}
WRITE_ROWS, WRITE_PLAN = 128, Plan(64, 64, 128, 1, 4, 4)  # the last write of more rows than FEW_ROWS


def plan_for(
    rows: int, columns: int, depth: int, element_bytes: int, *, x_bytes: int = 0, pair: bool = False, beside: bool = False
) -> Plan:  # fmt: skip
    """How to cut [rows, depth] x [columns, depth]^T.

    Args:
        element_bytes: of the weight. x_bytes: of the rows, where that is another type. pair: two weights of that size.
        beside: the product runs on a stream of its own, where nothing precedes it that lets it start early.
    """
    if beside:
        plan = BESIDE.get((columns, depth)) if element_bytes == 2 and rows <= 16 else None
        return replace(plan or plan_for(rows, columns, depth, element_bytes, x_bytes=x_bytes, pair=pair), start=NOT)
    bn = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if max(element_bytes, x_bytes) == 4:  # for comparison, whatever the weight
        return Plan(32, 16, 32, 1, 4, 1)
    measured = MEASURED if element_bytes == 2 else NARROW if (element_bytes, x_bytes) == (1, 2) else {}
    found = measured.get((columns, depth)) if rows <= 16 else None
    if found is not None and not (pair and (found.splits > 1 or found.lead)):  # which pairs cannot have
        return found
    if pair:
        return Plan(64, bn, 64 * (2 // element_bytes), 1, 4, 4)  # as many bytes a step
    if columns > 64 * 1024:
        return Plan(128, bn, 128, 1, 4, 4)
    splits = max(1, min(8, PROGRAMS // triton.cdiv(columns, 64), depth // 256))
    while splits > 1 and triton.cdiv(triton.cdiv(depth, splits), 256) * 256 * (splits - 1) >= depth:
        splits -= 1
    return Plan(64, bn, 256, splits, 4, 3)


ROUNDED_ROWS, ROUNDED_PROGRAMS = 256, 128
DEEP_ROWS, DEEP = 128, 2  # most rows of products whose depth is shared by two programs, and how many times as deep as wide they are


def rounded_plan(rows: int, columns: int, depth: int) -> Plan | None:
    """How to cut a product of float8 rows with a float8 weight into one wave of programs; None: the vendor's is no slower.

    Measured with scales by row and column, at Qwen3-8B's shapes and 128 rows: 8 to 9, 10 and 21 us for 4096 x 4096, 6144 x 4096 and (depth
    not shared) 4096 x 12288, the vendor's 14 to 19, 14 and 32; 30 for 4096 x 20480, the vendor's 55; at 256 rows 10 to 11 and 24 for the
    first and third, the vendor's 14 to 15 and 33. Smaller ones are taken to be alike.
    """
    tiles = triton.cdiv(columns, 64)
    if depth > max(256, DEEP * columns) and rows <= DEEP_ROWS and 2 * tiles <= ROUNDED_PROGRAMS:
        return Plan(64, max(16, triton.next_power_of_2(rows)), 256, 2, 4, 4)
    for rows_each in (32, 64, 128) if rows <= 32 else (64, 128):
        if rows <= ROUNDED_ROWS and tiles * triton.cdiv(rows, rows_each) <= ROUNDED_PROGRAMS:
            return Plan(64, rows_each, 256, 1, 4, 4)
    return None
