"""Float8 values (e4m3) with float32 scales, one per row of a matrix, and the product of two such matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from dspine_kernels.linear import Plan, Workspace, linear, rounded_plan
from dspine_kernels.rows import round_rows
from torch import Tensor

NARROW = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
Scales = Mapping[int, Tensor]  # by address of the rounded weight


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> float8_e4m3fn [N, K] and float32 scales [N] with weight ~ values * scales. A row of zeros keeps scale 1."""
    peak = weight.abs().amax(dim=1).float()
    scales = torch.where(peak > 0, peak / LARGEST, 1.0)
    return rounded(weight, scales), scales


def rounded(weight: Tensor, scales: Tensor) -> Tensor:
    """weight [N, K] over float32 scales [N] (none zero) -> float8_e4m3fn [N, K]"""
    chunks = [
        (rows.float() / by[:, None]).clamp(-LARGEST, LARGEST).to(NARROW)
        for rows, by in zip(weight.split(16384), scales.split(16384), strict=True)
    ]
    return torch.cat(chunks)


class Scratch:
    """What products whose depth is shared leave to each other, kept by plan and size, for products that run one after another.

    Counters are zero between launches, so they are made once; what is made while a CUDA graph is recorded is that graph's alone.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[Plan, int, int], Workspace] = {}

    def of(self, plan: Plan, out: Tensor) -> Workspace:
        """Large enough for a product into out [R, N]."""
        rows, columns = -(-out.shape[0] // plan.rows) * plan.rows, out.shape[1]
        found = self._made.get((plan, rows, columns))
        if found is None:
            found = Workspace.for_plans([(plan, rows, columns)], out.device)
            if not (out.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._made[plan, rows, columns] = found
        return found


def scaled_product(
    x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, out: Tensor,
    residual: Tensor | None = None, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """out [R, N] = (x x_scales) (weight scales)^T for x [R, K], weight [N, K] in e4m3, scales float32 [R] and [N].

    Ours where there is a plan (`own_plan`), else the vendor's; both take bfloat16 results and sizes in multiples of 16. Others are widened
    first, which is slow.

    Args:
        residual: [R, N], added before rounding, may be `out`; only by our own.
        scratch: of this product and others that never run at the same time; None: new at every call.
    """
    if (plan := own_plan(weight, out)) is not None:
        workspace = Workspace(out, out) if plan.splits == 1 else (scratch or Scratch()).of(plan, out)
        linear(x, weight, out, plan, workspace, scales=scales, x_scales=x_scales, residual=residual)
        return
    assert residual is None
    if _multiplies(weight, out):
        vendor_product(x, x_scales, weight, scales, out)
    else:
        out.copy_((x.float() * x_scales[:, None]) @ (weight.float() * scales[:, None]).T)


def own_plan(weight: Tensor, out: Tensor) -> Plan | None:
    """How our own product makes out [R, N] from weight [N, K] in e4m3, if it does."""
    return rounded_plan(*out.shape, weight.shape[1]) if _multiplies(weight, out) else None


def _multiplies(weight: Tensor, out: Tensor) -> bool:
    return out.is_cuda and out.dtype == torch.bfloat16 and weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0


def vendor_product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """The same by torch's library, for its types and sizes."""
    torch._scaled_mm(
        x, weight.T, scale_a=x_scales[:, None], scale_b=scales[None, :], out_dtype=out.dtype, use_fast_accum=True, out=out
    )  # fmt: skip


@dataclass(frozen=True)
class RoundedRows:
    """Activations: values float8_e4m3fn [R, K], scales float32 [R], every row's largest value the largest of e4m3."""

    values: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> RoundedRows:
        """Uninitialised ones."""
        return cls(torch.empty(rows, columns, dtype=NARROW, device=device), torch.empty(rows, device=device))

    def first(self, rows: int) -> RoundedRows:
        """Views of the first `rows` rows."""
        return RoundedRows(self.values[:rows], self.scales[:rows])

    def round(self, x: Tensor, **before: object) -> None:
        """Takes x [R, K]; `before`: what precedes the rounding, see `dspine_kernels.rows.round_rows`."""
        round_rows(x, self.values, self.scales, **before)

    def times(
        self, weight: Tensor, scales: Tensor, out: Tensor, residual: Tensor | None = None, scratch: Scratch | None = None
    ) -> None:
        """out [R, N] = the rows times weight [N, K] (e4m3, float32 scales [N])^T. residual, scratch: see `scaled_product`."""
        scaled_product(self.values, self.scales, weight, scales, out, residual, scratch)
