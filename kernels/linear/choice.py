"""Plans of skinny products, by shape and rows; measured on an H200 by whole draft passes (tools/bench_draft.py)."""

from __future__ import annotations

import triton
from dspine_kernels.linear.kernel import Plan

FEW_ROWS = 64  # most rows of two-byte values for which these products beat the vendor's
PROGRAMS = 128  # about one a multiprocessor: further shares of the depth cost more than they hide
# Up to 16 rows of bfloat16: columns, depth -> plan.
MEASURED: dict[tuple[int, int], Plan] = {
    (6144, 4096): Plan(16, 16, 256, 1, 2, 5),
    (12288, 4096): Plan(64, 16, 128, 1, 4, 4),
    (2560, 4096): Plan(64, 16, 128, 3, 4, 6),
    (8704, 4096): Plan(64, 16, 128, 1, 4, 4),
}


def plan_for(rows: int, columns: int, depth: int, element_bytes: int, *, pair: bool = False) -> Plan:
    """How to cut [rows, depth] x [columns, depth]^T; `pair`: two weights of that size."""
    bn = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if element_bytes == 4:
        return Plan(32, 16, 32, 1, 4, 1)
    if rows <= 16 and (columns, depth) in MEASURED:
        return MEASURED[columns, depth]
    if pair:
        return Plan(64, bn, 64, 1, 4, 4)
    if columns > 64 * 1024:
        return Plan(128, bn, 128, 1, 4, 4)
    splits = max(1, min(8, PROGRAMS // triton.cdiv(columns, 64), depth // 256))
    while splits > 1 and triton.cdiv(triton.cdiv(depth, splits), 256) * 256 * (splits - 1) >= depth:
        splits -= 1
    return Plan(64, bn, 256, splits, 4, 3)
