"""Runs one operator of a plugin library and compares it with the float64 reference.

Outputs and workspace are filled with NaN first and outputs carry a guard band behind them, so that a launch that does nothing, writes
too little or writes too far cannot pass. Each operator runs twice and must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from dspine_plugins.harness import cases, reference
from dspine_plugins.harness.binding import HarnessPlugin
from dspine_plugins.harness.cases import EPS, Case
from torch import Tensor

from dspine_export.ops_schema import OPS

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
_GUARD = 512
_POISON_TOKEN = -(2**62)


@dataclass(frozen=True)
class Prepared:
    """A configured plugin with its device buffers; `launch` runs it on torch's current stream."""

    plugin: HarnessPlugin
    inputs: list[Tensor]
    outputs: list[Tensor]
    workspace: Tensor
    guards: list[Tensor] = field(repr=False)

    def launch(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.inputs[0].is_cuda else 0
        self.plugin.enqueue(self.inputs, self.outputs, self.workspace, stream)


def prepare(plugin: HarnessPlugin, op: str, case: Case, inputs: list[Tensor]) -> Prepared:
    """Allocates poisoned outputs and a poisoned workspace of exactly the size the plugin asks for."""
    guards, outputs = [], []
    for shape, dtype in _output_specs(op, case, inputs[0].dtype):
        count = int(torch.Size(shape).numel())
        guard = torch.empty(count + _GUARD, dtype=dtype, device=inputs[0].device)
        guards.append(guard)
        outputs.append(guard[:count].view(shape))
    size = plugin.configure(inputs, outputs)
    workspace = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device=inputs[0].device)
    prepared = Prepared(plugin, inputs, outputs, workspace, guards)
    poison(prepared)
    return prepared


def poison(prepared: Prepared) -> None:
    """Fills outputs, guard bands and workspace with NaN (integers: an impossible token)."""
    for guard in prepared.guards:
        guard.fill_(float("nan") if guard.is_floating_point() else _POISON_TOKEN)
    prepared.workspace.fill_(0xFF)


def check(
    op: str,
    case: Case,
    dtype: torch.dtype,
    harness: Path,
    library: Path,
    *,
    device: str = "cuda",
    skip_launch: bool = False,
) -> str:
    """Returns a one-line result such as "max error 3.1e-07".

    `device` is "cpu" only for a library whose kernels were compiled for the CPU. `skip_launch` leaves the poison in place, to prove
    that the check notices.

    Raises:
        AssertionError: the outputs are wrong.
    """
    generator = torch.Generator(device).manual_seed(sum(map(ord, op + case.name)))
    inputs = operands(op, case, dtype, generator)
    attributes = {name: EPS for schema in OPS if schema.op_type == op for name in schema.attributes}
    with HarnessPlugin(harness, library, op, attributes) as plugin:
        prepared = prepare(plugin, op, case, inputs)
        results = []
        for _ in range(2):
            poison(prepared)
            if not skip_launch:
                prepared.launch()
            if device == "cuda":
                torch.cuda.synchronize()
            results.append([output.clone() for output in prepared.outputs])
        _check_guards(prepared)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first.nan_to_num(7e7), second.nan_to_num(7e7)), "two launches differ"
    return _COMPARE[op](inputs, results[0], dtype)


def operands(op: str, case: Case, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    """Random operands of an operator on the generator's device, in schema order."""
    device = generator.device
    if op == "AdjacentInjection":
        return cases.injection_operands(case, dtype, device, generator)
    if op == "TransitionScores":
        return cases.transition_operands(case, dtype, device, generator)
    return cases.walk_operands(case, device, generator)


def _output_specs(op: str, case: Case, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    n, slots, k = case.batch, case.block - 1, case.candidates
    if op == "AdjacentInjection":
        return [((n, case.block, case.hidden), dtype)]
    if op == "TransitionScores":
        return [((n, slots, k, k), torch.float32)]
    return [((n, slots), torch.int64), ((n, slots, k), torch.float32)]


def _check_guards(prepared: Prepared) -> None:
    for guard in prepared.guards:
        tail = guard[-_GUARD:]
        intact = tail.isnan() if tail.is_floating_point() else tail == _POISON_TOKEN
        assert bool(intact.all()), "wrote behind the end of an output"


def _compare_injection(inputs: Sequence[Tensor], outputs: Sequence[Tensor], dtype: torch.dtype) -> str:
    wanted = reference.adjacent_injection(inputs)
    hidden = inputs[0].double()
    assert torch.equal(outputs[0][:, 0], inputs[0][:, 0]), "slot 0 is not a copy"
    scale = wanted.abs() + hidden.square().mean(-1, keepdim=True).sqrt() + 1e-30
    return _judge((outputs[0].double() - wanted).abs() / scale, dtype)


def _compare_transition(inputs: Sequence[Tensor], outputs: Sequence[Tensor], dtype: torch.dtype) -> str:
    wanted = reference.transition_scores(inputs, EPS)
    head, ids = inputs[7], inputs[3].clamp(0, inputs[7].shape[0] - 1)
    scale = head[ids].double().norm(dim=-1).unsqueeze(-2)  # [N, B-1, 1, K]: a score is about this large
    return _judge((outputs[0].double() - wanted).abs() / scale, dtype)


def _compare_walk(inputs: Sequence[Tensor], outputs: Sequence[Tensor], _dtype: torch.dtype) -> str:
    problem = reference.walk_is_consistent(inputs, outputs[0], outputs[1], tolerance=1e-6)
    assert problem is None, problem
    return "exact"


def _judge(error: Tensor, dtype: torch.dtype) -> str:
    worst = float(error.max())
    assert worst <= TOLERANCES[dtype], f"max error {worst:.2e} > {TOLERANCES[dtype]:.0e}"  # NaN fails too
    return f"max error {worst:.1e}"


_COMPARE: dict[str, Callable[[Sequence[Tensor], Sequence[Tensor], torch.dtype], str]] = {
    "AdjacentInjection": _compare_injection,
    "TransitionScores": _compare_transition,
    "LatticeWalk": _compare_walk,
}
