"""The skinny product against its naive reference: every epilogue, shared depth, sizes that no tile divides, poisoned outputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_kernels.linear import Plan, Workspace, linear, linear_reference
from torch import Tensor

from tests.kernels.comparison import close, poisoned, randn

PLANS = [Plan(16, 16, 32, 1, 2, 2), Plan(32, 16, 32, 3, 4, 2), Plan(64, 32, 64, 2, 4, 2, lead=True)]
SHAPES = [(6, 72, 136), (16, 128, 192), (35, 40, 264)]  # rows of x, rows of the weight, depth


def _squares(x: Tensor, parts: int) -> Tensor:
    return x.float().pow(2).unflatten(-1, (parts, -1)).sum(-1).T.contiguous()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.weight_rows}x{plan.rows}x{plan.depth}s{plan.splits}")
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_linear(
    plan: Plan, rows: int, columns: int, depth: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        x = randn(rows, depth, device=device, dtype=dtype, scale=2.0)
        weight = randn(columns, depth, device=device, dtype=dtype, scale=0.1)
        workspace = Workspace.for_plans([(plan, rows, columns)], device)
        squares = _squares(x, 4)
        out = poisoned(rows, columns, device=device, dtype=dtype)
        for _ in range(2):  # the counters are left as they were found
            close(linear(x, weight, out.fill_(float("nan")), plan, workspace), linear_reference(x, weight), dtype)
        got = linear(x, weight, out, plan, workspace, squares=squares, norm_width=depth, eps=1e-6)
        close(got, linear_reference(x, weight, squares=squares, norm_width=depth, eps=1e-6), dtype)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.weight_rows}x{plan.rows}x{plan.depth}s{plan.splits}")
@pytest.mark.parametrize("write_block", [0, 5])
def test_residual_and_write(
    plan: Plan, write_block: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    for dtype in dtypes:
        rows, columns, depth = 20, 72, 136
        x, weight = randn(rows, depth, device=device, dtype=dtype), randn(columns, depth, device=device, dtype=dtype)
        residual, gain = (
            randn(rows, columns, device=device, dtype=dtype, scale=5.0),
            randn(columns, device=device, dtype=dtype),
        )
        before = _squares(residual, 2) if write_block else None
        keywords = {"squares": before, "norm_width": columns, "write": write_block > 0, "block": max(1, write_block)}
        want = linear_reference(x, weight, residual=residual, **keywords)
        workspace = Workspace.for_plans([(plan, rows, columns)], device)
        scaled, sums = (
            poisoned(rows, columns, device=device, dtype=dtype),
            poisoned(plan.tiles(columns), rows, device=device),
        )
        out = residual.clone()
        linear(
            x, weight, out, plan, workspace, residual=out, squares_out=sums, gain=gain, scaled=scaled, **keywords
        )  # in place
        close(out, want, dtype)
        close(scaled, out.float() * gain.float(), dtype)
        close(sums.sum(0), out.float().pow(2).sum(-1), torch.float32)
        if write_block:
            assert torch.equal(out[::write_block], residual[::write_block])


def test_pair(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        plan, rows, columns, depth = Plan(32, 16, 64, 1, 4, 2), 18, 40, 72
        x, weight = (
            randn(rows, depth, device=device, dtype=dtype),
            randn(2 * columns, depth, device=device, dtype=dtype),
        )
        squares = _squares(x, 1)
        out = poisoned(rows, columns, device=device, dtype=dtype)
        keywords = {"squares": squares, "norm_width": depth, "eps": 1e-6, "pair": True}
        linear(x, weight, out, plan, Workspace.for_plans([], device), **keywords)
        close(out, linear_reference(x, weight, **keywords), dtype)
