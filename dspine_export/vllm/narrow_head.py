"""Candidates by a float8 copy of the language-model head, which is half as much to read; the head itself has the last word.

The copy only draws up a shortlist, longer than the candidates by some places; products with the head's own rows pick and order the
candidates from it. Rounding moves an id by a few places near the end of the shortlist, where it is not a candidate anyway.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from dspine_export.runtime.float8 import quantise, scaled_product, vendor_product
from dspine_export.vllm.fused_messages import skinny_plan

SWITCH, DEFAULT = "DSPINE_VLLM_NARROW_HEAD", "1"  # 0: candidates by the head alone
MOST_CANDIDATES = 16  # a shortlist has twice as many places
FEW_ROWS = 64  # most rows of our own product


@dataclass(frozen=True)
class NarrowHead:
    """values: float8_e4m3fn [V, d]; scales: float32 [V]."""

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, weight: Tensor, count: int) -> NarrowHead | None:
        """A copy of `weight` [V, d]; None where the switch is off, candidates are too many or the GPU does not multiply float8."""
        if os.environ.get(SWITCH, DEFAULT) == "0" or count > MOST_CANDIDATES or not _suits(weight):
            return None
        return cls(*quantise(weight))

    def candidates(self, rows: Tensor, weight: Tensor, block: int, ids: Tensor) -> Tensor:
        """Ids of the K largest products with `weight` [V, d], written to ids int64 [N*(B-1), K].

        rows: [N*B, d], of any scale each, in flattened blocks whose first rows are left out.
        """
        from dspine_kernels.rows import round_rows
        from dspine_kernels.topk import SHORTLIST, rescore, shortlist

        rounded = torch.empty(rows.shape, dtype=self.values.dtype, device=rows.device)
        scales = torch.empty(rows.shape[0], device=rows.device)
        round_rows(rows, rounded, scales)
        listed = torch.empty(len(ids), SHORTLIST, dtype=torch.int64, device=rows.device)
        if rows.shape[0] <= FEW_ROWS:
            logits, keys = self._skinny(rounded, block, len(ids))
            shortlist(logits, listed, block, keys)
        else:
            shortlist(_product(rounded, scales, self.values, self.scales), listed, block)
        return rescore(rows, weight, listed, ids, block)

    def _skinny(self, rounded: Tensor, block: int, slots: int) -> tuple[Tensor, Tensor | None]:
        """Logits but for a factor by row, and the largest key of every tile where the product's tiles are the shortlist's."""
        from dspine_kernels.linear import linear
        from dspine_kernels.topk.shortlist import TILE

        plan, workspace = skinny_plan(len(rounded), *self.values.shape, rounded.dtype, rounded.device)
        logits = torch.empty(len(rounded), len(self.values), device=rounded.device)
        keys = torch.empty(slots, plan.tiles(len(self.values)), dtype=torch.int64, device=rounded.device)
        linear(rounded, self.values, logits, plan, workspace, keys=keys, block=block, scales=self.scales)
        return logits, keys if plan.weight_rows == TILE else None


def _suits(weight: Tensor) -> bool:
    """Whether the device and the vendor's library have a product for float8 copies of `weight`, tried on a few rows."""
    if weight.dtype != torch.bfloat16 or weight.shape[0] % 16 or weight.shape[1] % 16:
        return False
    if not weight.is_cuda or torch.version.hip is not None or torch.cuda.get_device_capability(weight.device)[0] < 9:
        return False
    values, scales = quantise(weight[:16])
    try:
        vendor_product(values, scales, values, scales, weight.new_empty(16, 16))
    except RuntimeError:
        return False
    return True


def _product(rows: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """rows [R, K], weight [V, K] float8, float32 scales [R] and [V] -> bfloat16 [R, V]"""
    out = torch.empty(len(rows), len(weight), dtype=torch.bfloat16, device=rows.device)
    scaled_product(rows, row_scales, weight, scales, out)
    return out
