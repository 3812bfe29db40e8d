"""`drop_training_only` and the noise it removes."""

from __future__ import annotations

import pytest
import torch

from dspine_export.passes.cleanup import drop_training_only
from dspine_export.passes.program import Program, emit, from_traced
from tests.programs import DSPINE, VARIANTS, assert_drafts_like_eager, count, drafter_of, fingerprint, synthetic, traced

aten = torch.ops.aten
CONTEXT_ONLY = {"fc.weight", "hidden_norm.weight"}


def readout_uses(program: Program) -> list[int]:
    layers = range(program.config.num_layers)
    nodes = [program.weight_node(f"injection.readouts.{layer}.weight") for layer in layers]
    return [0 if node is None else len(node.users) for node in nodes]


@pytest.mark.parametrize("name", DSPINE)
def test_readouts_after_injection_go(name: str) -> None:
    before = from_traced(traced(name)["draft"])
    after = drop_training_only(before)
    layers = before.config.num_layers
    assert len(before.output_nodes()) == len(before.contract.outputs) + layers
    assert len(after.output_nodes()) == len(after.contract.outputs)
    assert readout_uses(before) == [2] * layers and readout_uses(after) == [1] * layers
    assert len(after.graph.nodes) < len(before.graph.nodes)
    # Readouts still have their use before the injection; the context projection belongs to the other entry.
    assert set(before.weights.values()) - set(after.weights.values()) == CONTEXT_ONLY


def test_a_weight_of_training_alone_goes() -> None:
    program = from_traced(traced("plain")["draft"])
    readout = program.weight_node("injection.readouts.0.weight")
    assert readout is not None
    kept = program.weight_node("injection.readouts.1.weight")
    users = list(readout.users)
    users[0].replace_input_with(readout, kept)  # the use before the injection reads another weight
    after = drop_training_only(program)
    assert after.weight_node("injection.readouts.0.weight") is None
    assert "injection.readouts.0.weight" not in after.weights.values()


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in DSPINE])
def test_dflash_has_no_training_outputs(name: str) -> None:
    before = from_traced(traced(name)["draft"])
    after = drop_training_only(before)
    assert set(before.weights.values()) - set(after.weights.values()) == CONTEXT_ONLY
    assert len(after.output_nodes()) == len(before.output_nodes()) == 2


def test_noise_and_what_only_looks_like_it() -> None:
    """Casts to the same type and whole slices go; casts that change the type and slices that cut stay."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, 1:] + 1, x[0:] * 2

    program = synthetic(function, torch.randn(3, 4))
    x = next(iter(program.placeholders()))
    multiplied = next(node for node in program.graph.nodes if node.target == aten.mul.Tensor)
    with program.graph.inserting_before(multiplied):
        same = emit(program.graph, aten.to.dtype, x, torch.float32)
        wide = emit(program.graph, aten.to.dtype, same, torch.float64)
        back = emit(program.graph, aten.to.dtype, wide, torch.float32)
    multiplied.update_arg(0, back)
    after = drop_training_only(program)
    casts = [node.args[1] for node in after.graph.nodes if node.target == aten.to.dtype]
    assert casts == [torch.float64, torch.float32]
    slices = [node.args[1:] for node in after.graph.nodes if node.target == aten.slice.Tensor]
    assert len(slices) == 1 and slices[0][1] == 1
    value = torch.randn(3, 4)
    assert torch.equal(after.run({}, {x.name: value})["out0"], value[:, 1:] + 1)


def test_idempotent_and_pure() -> None:
    program = from_traced(traced("plain")["draft"])
    before = fingerprint(program)
    once = drop_training_only(program)
    assert fingerprint(program) == before
    assert fingerprint(drop_training_only(once)) == fingerprint(once)


@pytest.mark.parametrize("name", ["plain", "dflash_bidirectional"])
def test_numeric(name: str) -> None:
    after = drop_training_only(from_traced(traced(name)["draft"]))
    assert count(after, aten._assert_tensor_metadata.default) == 0
    assert_drafts_like_eager(after, drafter_of(name), [3, 0], 5)
