"""The skinny product against its naive reference: every epilogue, shared depth, sizes that no tile divides, poisoned outputs."""

from __future__ import annotations

from itertools import product
from math import ceil

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_kernels.dependent import EARLY
from dspine_kernels.linear import Plan, Workspace, linear, linear_reference, plan_for, rounded_plan
from dspine_kernels.topk import select_candidates
from torch import Tensor

from tests.kernels.comparison import close, poisoned, randn

PLANS = [
    Plan(16, 16, 32, 1, 2, 2),
    Plan(32, 16, 32, 3, 4, 2),
    Plan(64, 32, 64, 2, 4, 2, lead=1),
    Plan(32, 16, 16, 2, 4, 2, lead=2, start=EARLY),
]
SHAPES = [(6, 72, 136), (16, 64, 192), (35, 40, 136), (7, 40, 72)]  # rows of x, rows of the weight, depth


def _squares(x: Tensor, parts: int) -> Tensor:
    return x.float().pow(2).unflatten(-1, (parts, -1)).sum(-1).T.contiguous()


@pytest.mark.parametrize(
    ("plan", "rows", "columns", "depth"), [(plan, *shape) for plan, shape in zip(PLANS, SHAPES, strict=True)]
)
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


def test_narrow_weight_and_kept_scales(device: torch.device) -> None:
    """A weight in a narrower type, widened in registers, with one scale per row; paired, gate and up have their own."""
    plan, rows, columns, depth = Plan(32, 16, 32, 1, 4, 2), 5, 24, 40
    x = torch.randn(rows, depth, device=device)
    weight, scales = torch.randn(2 * columns, depth, device=device).half(), torch.rand(2 * columns, device=device) + 0.5
    workspace = Workspace.for_plans([], device)
    for pair in (False, True):
        out = poisoned(rows, columns if pair else 2 * columns, device=device)
        linear(x, weight, out, plan, workspace, pair=pair, scales=scales)
        close(out, linear_reference(x, weight.float() * scales[:, None], pair=pair), torch.float32)


def test_float8_weights_by_their_plans(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Weights of one byte, as `plan_for` cuts them: in shares of the depth, and paired."""
    dtype = dtypes[-1]  # of two bytes on a GPU; the plans are for these
    shapes = ((16, 64, 1040, False), (40, 72, 64, False), (5, 40, 192, True), (64, 136, 400, True))
    for rows, columns, depth, pair in shapes:
        plan = plan_for(rows, columns, depth, 1, x_bytes=2, pair=pair)
        x = randn(rows, depth, device=device, dtype=dtype)
        weight = torch.randn(columns * (1 + pair), depth, device=device).to(torch.float8_e4m3fn)
        scales = torch.rand(len(weight), device=device) + 0.5
        out = poisoned(rows, columns, device=device, dtype=dtype)
        linear(x, weight, out, plan, Workspace.for_plans([(plan, rows, columns)], device), pair=pair, scales=scales)
        close(out, linear_reference(x, weight.float() * scales[:, None], pair=pair), dtype)


@pytest.mark.parametrize(("rows", "warps"), [(32, 2), (32, 4), (64, 4), (128, 4)])
def test_every_float8_number_is_widened_exactly(
    rows: int, warps: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    """By moved bits where the GPU does it so; rows and warps decide how a weight lies in registers. One row of x picks each number."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[numbers.float().isfinite()].repeat(2)[:256].to(device)
    weight = torch.stack([numbers.view(torch.uint8).roll(shift) for shift in range(256)]).view(torch.float8_e4m3fn)
    for dtype in dtypes:
        plan = Plan(rows, 16, 128, 1, warps, 3)
        for picked in (0, 5, 254, 255):
            x = torch.zeros(16, 256, device=device, dtype=dtype)
            x[3, picked] = 1
            got = poisoned(16, 256, device=device, dtype=dtype)
            linear(x, weight, got, plan, Workspace.for_plans([(plan, 16, 256)], device))
            assert torch.equal(got[3].float(), weight.float()[:, picked])
            assert not got[:3].any() and not got[4:].any()


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("splits", [1, 2])
def test_float8_rows(pair: bool, splits: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Float8 times float8, with a scale for every row of both."""
    rows, columns, depth = 70, 136, 320
    if pair and splits > 1:
        pytest.skip("pairs share no depth")
    plan = Plan(64, 64, 64, splits, 4, 3)
    x, weight = (randn(n, depth, device=device, dtype=torch.float32).to(torch.float8_e4m3fn) for n in (rows, columns * (1 + pair)))
    x_scales, scales = (torch.rand(len(values), device=device) + 0.5 for values in (x, weight))
    out = poisoned(rows, columns, device=device, dtype=dtypes[-1])
    workspace = Workspace.for_plans([(plan, rows, columns)], device)
    linear(x, weight, out, plan, workspace, pair=pair, scales=scales, x_scales=x_scales)
    want = linear_reference(x.float() * x_scales[:, None], weight.float() * scales[:, None], pair=pair)
    close(out, want, torch.bfloat16)


@pytest.mark.parametrize(("rows", "columns", "depth", "pair"), [
    (16, 6144, 4096, False), (16, 4096, 12288, False), (16, 12288, 4096, True), (16, 4096, 4096, False),
])  # fmt: skip
def test_measured_float8_plans(rows: int, columns: int, depth: int, pair: bool, device: torch.device) -> None:
    """Of the shapes they were measured at."""
    if device.type != "cuda":
        pytest.skip("takes minutes under Triton's interpreter; runs on a GPU")
    plan = plan_for(rows, columns, depth, 1, x_bytes=2, pair=pair)
    x = randn(rows, depth, device=device, dtype=torch.bfloat16)
    weight = (torch.randn(columns * (1 + pair), depth, device=device) * 0.1).to(torch.float8_e4m3fn)
    scales = torch.rand(len(weight), device=device) / depth**0.5 + 0.01
    workspace, out = Workspace.for_plans([(plan, rows, columns)], device), None
    for _ in range(3):  # the counters are left as they were found
        out = poisoned(rows, columns, device=device, dtype=torch.bfloat16)
        linear(x, weight, out, plan, workspace, pair=pair, scales=scales)
    close(out, linear_reference(x, weight.float() * scales[:, None], pair=pair), torch.bfloat16)


def test_largest_keys_of_tiles(device: torch.device) -> None:
    """What selection reads: per tile the largest logit's key, of every row but the anchors'."""
    plan, rows, columns, depth, block = Plan(32, 16, 32, 1, 4, 2), 8, 72, 40, 4
    x, weight = torch.randn(rows, depth, device=device), torch.randn(columns, depth, device=device)
    logits, keys = (
        poisoned(rows, columns, device=device),
        torch.zeros(6, plan.tiles(columns), dtype=torch.int64, device=device),
    )
    linear(x, weight, logits, plan, Workspace.for_plans([], device), keys=keys, block=block)
    ids = torch.full((6, 5), -1, dtype=torch.int64, device=device)
    select_candidates(logits, ids, keys, plan.weight_rows, block)
    slots = torch.arange(rows, device=device) % block > 0
    assert torch.equal(ids, logits[slots].topk(5, dim=-1).indices)


def test_plans_cover_their_shapes() -> None:
    """Every share of the depth has work, whatever the shape."""
    for rows in (1, 16, 17, 40, 512):
        for columns, depth in ((8, 8), (4096, 512), (1000, 776), (64, 4096), (151936, 4096), (4096, 12288), (6144, 4096), (4096, 4096)):
            for weight_bytes, pair in product((1, 2, 4), (False, True)):
                plan = plan_for(rows, columns, depth, weight_bytes, x_bytes=2, pair=pair)
                share = ceil(ceil(depth / plan.splits) / plan.depth) * plan.depth
                assert share * (plan.splits - 1) < depth
                assert not (pair and (plan.splits > 1 or plan.lead)), "which a pair cannot have"


def test_float8_rows_are_cut_into_one_wave() -> None:
    """Ours where programs are about as many as multiprocessors, the vendor's elsewhere."""
    found = {(rows, columns): rounded_plan(rows, columns, 4096) for rows in (16, 128, 160, 256, 512) for columns in (4096, 6144, 24576)}
    assert {key for key, plan in found.items() if plan is None} == {
        (160, 6144), (256, 6144), *((rows, 24576) for rows in (16, 128, 160, 256)), *((512, columns) for columns in (4096, 6144, 24576))
    }  # fmt: skip
    assert found[128, 4096] == Plan(64, 64, 256, 1, 4, 4) and found[256, 4096] == Plan(64, 128, 256, 1, 4, 4)
    assert found[16, 4096] == Plan(64, 32, 256, 1, 4, 4)
    assert rounded_plan(10, 4096, 12288) == Plan(64, 16, 256, 2, 4, 4), "deep ones are shared"
    assert rounded_plan(128, 4096, 20480) == Plan(64, 128, 256, 2, 4, 4)
    assert rounded_plan(160, 4096, 20480) == Plan(64, 128, 256, 1, 4, 4)
    assert rounded_plan(512, 4096, 20480) is None
    for depth in range(16, 2048, 16):
        plan = rounded_plan(16, 16, depth)
        assert plan is not None and (plan.splits == 1 or 256 * ceil(depth / 512) < depth), "every share has some of it"
