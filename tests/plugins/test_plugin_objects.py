"""The IPluginV3 objects, driven by the C++ harness: everything except execution, which needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dspine_plugins.build import HARNESS_NAME, LIBRARY_NAME
from dspine_plugins.harness import cases, reference
from dspine_plugins.harness.binding import HarnessError, HarnessPlugin
from dspine_plugins.harness.cases import CASES, Case
from torch import Tensor

from dspine_export.model.injection import inject
from dspine_export.model.transition import predecessor_ids, score_pairs, walk

SMALL = [case for case in CASES if not case.timed]
CASE = SMALL[2]
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
BY_NAME = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)


def _open(directory: Path, op: str, **attributes: float) -> HarnessPlugin:
    return HarnessPlugin(directory / HARNESS_NAME, directory / LIBRARY_NAME, op, attributes)


def _injection(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    inputs = cases.injection_operands(case, dtype, CPU, torch.Generator().manual_seed(1))
    return inputs, [torch.empty_like(inputs[0])]


def _transition(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    inputs = cases.transition_operands(case, dtype, CPU, torch.Generator().manual_seed(1))
    return inputs, [torch.empty(*inputs[3].shape, case.candidates)]


def _walk(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    inputs = cases.walk_operands(case, CPU, torch.Generator().manual_seed(1))
    return inputs, [torch.empty_like(inputs[1][..., 0]), torch.empty(inputs[1].shape)]


@DTYPES
@BY_NAME
def test_objects_accept_every_case(plugin_directory: Path, case: Case, dtype: torch.dtype) -> None:
    with _open(plugin_directory, "AdjacentInjection") as plugin:
        assert plugin.configure(*_injection(case, dtype)) > 0
    with _open(plugin_directory, "TransitionScores", eps=1e-6) as plugin:
        assert plugin.configure(*_transition(case, dtype)) > 0
    with _open(plugin_directory, "LatticeWalk") as plugin:
        assert plugin.configure(*_walk(case)) == 0


@DTYPES
def test_workspace_of_the_largest_batch_is_enough(plugin_directory: Path, dtype: torch.dtype) -> None:
    def case(batch: int) -> Case:
        return Case("", batch, 16, 512, 64, 64, 16, 100)

    with _open(plugin_directory, "TransitionScores", eps=1e-6) as plugin:
        sizes = [plugin.configure(*_transition(case(batch), dtype)) for batch in range(1, 40)]
    assert sizes == sorted(sizes)


@DTYPES
def test_mixed_types_are_refused(plugin_directory: Path, dtype: torch.dtype) -> None:
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    inputs, outputs = _transition(CASE, dtype)
    with _open(plugin_directory, "TransitionScores", eps=1e-6) as plugin:
        assert plugin.refused_operand(inputs, outputs) is None
        for position, tensor in enumerate(inputs):
            wrong = tensor.int() if tensor.dtype == torch.int64 else tensor.to(other)
            changed = [*inputs[:position], wrong, *inputs[position + 1 :]]
            # A changed first operand sets the type, so that the next compute operand is the odd one.
            assert plugin.refused_operand(changed, outputs) == (position or 1)
        assert plugin.refused_operand(inputs, [outputs[0].bfloat16()]) == len(inputs)
        assert plugin.refused_operand([inputs[0].half(), *inputs[1:]], outputs) == 0


def test_contradicting_shapes_are_refused(plugin_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    inputs, outputs = _injection(CASE, torch.float32)
    inputs[7] = inputs[7][:, 1:].contiguous()
    with (
        _open(plugin_directory, "AdjacentInjection") as plugin,
        pytest.raises(HarnessError, match="configurePlugin refused"),
    ):
        plugin.configure(inputs, outputs)
    message = f"[dspine] AdjacentInjection: write_weight dimension 1 is {CASE.message - 1}, expected {CASE.message}"
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("block", "candidates", "message"),
    [(33, 4, "block size is 33, supported are 2 to 32"), (4, 65, "number of candidates is 65, supported are 1 to 64")],
)
def test_limits_are_named(
    plugin_directory: Path, capfd: pytest.CaptureFixture[str], block: int, candidates: int, message: str
) -> None:
    case = Case("", 1, block, 16, 16, 16, candidates, 100)
    with _open(plugin_directory, "LatticeWalk") as plugin, pytest.raises(HarnessError):
        plugin.configure(*_walk(case))
    assert message in capfd.readouterr().err


def test_missing_attribute_is_named(plugin_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HarnessError, match="createPlugin"):
        _open(plugin_directory, "TransitionScores")
    assert "attribute eps is missing" in capfd.readouterr().err


@BY_NAME
def test_reference_equals_the_torch_model(case: Case) -> None:
    """The kernels' oracle is independent of the model, so the two must agree."""
    injection, _ = _injection(case, torch.float64)
    assert (inject(*injection) - reference.adjacent_injection(injection)).abs().max() < 1e-10
    transition, _ = _transition(case, torch.float64)
    pre, receiver, anchors, ids, table, write, gamma, head = transition
    last = case.vocab - 1
    rows = table[predecessor_ids(anchors, ids.clamp(0, last))]
    m = case.message
    scores = score_pairs(pre, receiver, rows[..., :m], rows[..., m:], ids.clamp(0, last), write, gamma, head, 1e-6)
    assert (scores - reference.transition_scores(transition, 1e-6)).abs().max() < 1e-10
    walked, _ = _walk(case)
    assert reference.walk_is_consistent(walked, *walk(*walked), 1e-6) is None


def test_walk_check_notices_wrong_results() -> None:
    operands, _ = _walk(CASE)
    tokens, q = walk(*operands)
    assert reference.walk_is_consistent(operands, tokens + 1, q, 1e-6) is not None
    assert reference.walk_is_consistent(operands, tokens, q * float("nan"), 1e-6) is not None
