"""The ordered lists, the verifier between passes, and the way back to an ExportedProgram."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dspine_export.errors import BuildError
from dspine_export.lowering.onnx_export import check_fused
from dspine_export.ops_schema import ADJACENT_INJECTION, DOMAIN, OPS, TRANSITION_SCORES, OpSchema
from dspine_export.passes import pipeline
from dspine_export.passes.pipeline import FUSED, PORTABLE, apply_passes
from dspine_export.passes.program import Program, emit, from_traced, to_exported
from dspine_export.passes.torch_ops import bind_dimensions, declaration, overload
from dspine_export.passes.verifier import verify
from tests.programs import DSPINE, VARIANTS, assert_drafts_like_eager, draft_case, drafter_of, traced, weights_of

aten = torch.ops.aten


def own_operators(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if str(node.target).startswith(f"{DOMAIN}.")]


@pytest.mark.parametrize("name", VARIANTS)
def test_forms(name: str) -> None:
    """Fused holds L + 2 of our operators, portable none; both compute what the eager model computes."""
    entry = traced(name)["draft"]
    fused, portable = apply_passes(entry, "fused"), apply_passes(entry, "portable")
    expected = entry.config.num_layers + 2 if name in DSPINE else 0
    assert len(own_operators(fused)) == expected and own_operators(portable) == []
    check_fused(fused)
    for program in (fused, portable):
        assert_drafts_like_eager(program, drafter_of(name), [3, 0, 1], 4)
    for form in ("fused", "portable"):
        assert own_operators(apply_passes(traced(name)["context"], form)) == []  # type: ignore[arg-type]


def test_a_pattern_that_stopped_matching_fails_the_build() -> None:
    portable = apply_passes(traced("plain")["draft"], "portable")
    with pytest.raises(BuildError, match="Fusion did not find the operator") as caught:
        check_fused(portable)
    assert "dspine::AdjacentInjection" in str(caught.value) and "expected: 2" in str(caught.value)


def test_back_to_an_exported_program() -> None:
    """The exported program runs, given the weights, and agrees with the graph it came from."""
    drafter = drafter_of("plain")
    program = apply_passes(traced("plain")["draft"], "fused")
    exported = to_exported(program)
    names = [s.target for s in exported.graph_signature.input_specs if s.kind.name == "PARAMETER"]
    assert set(names) == set(program.weights.values())
    weights = weights_of(drafter)
    inputs, want = draft_case(drafter, [3, 0], 5)
    ordered = [inputs[spec.name] for spec in program.contract.inputs]
    with torch.no_grad():
        got = torch.fx.GraphModule(torch.nn.Module(), exported.graph)(*(weights[str(n)] for n in names), *ordered)
    assert torch.equal(got[0], want.tokens)


def test_pass_lists() -> None:
    assert [rewrite.__name__ for rewrite in FUSED] == [
        "drop_training_only",
        "fold_transfer_tables",
        "fuse_adjacent_injection",
        "fuse_transition",
        "precision_policy",
        "mark_decomposable_attention",
    ]
    assert set(PORTABLE) < set(FUSED)


# --- the verifier, with one planted fault each


def wrong_dtype(program: Program) -> Program:
    node = program.output_nodes()[2]
    with program.graph.inserting_after(node):
        narrow = emit(program.graph, aten.to.dtype, node, torch.bfloat16)
    program.graph.output_node().replace_input_with(node, narrow)
    return program


def wrong_shape(program: Program) -> Program:
    node = program.output_nodes()[0]
    with program.graph.inserting_after(node):
        cut = emit(program.graph, aten.slice.Tensor, node, 1, 0, 2)
    program.graph.output_node().replace_input_with(node, cut)
    return program


def missing_output(program: Program) -> Program:
    output = program.graph.output_node()
    output.args = (output.args[0][:-1],)  # type: ignore[index]
    return program


def unknown_namespace(program: Program) -> Program:
    node = next(n for n in program.graph.nodes if n.target == aten.mul.Tensor)
    node.target = torch.ops.prims.mul.default
    return program


def no_recorded_shape(program: Program) -> Program:
    node = next(n for n in program.graph.nodes if n.op == "call_function")
    del node.meta["val"]
    return program


def lost_input(program: Program) -> Program:
    node = next(n for n in program.placeholders() if n.name == "uniforms")
    node.replace_all_uses_with(next(n for n in program.placeholders() if n.name == "temperature"))
    program.graph.erase_node(node)
    return program


def weight_without_placeholder(program: Program) -> Program:
    return replace(program, weights={**program.weights, "p_ghost": "ghost"})


def weight_bound_twice(program: Program) -> Program:
    first, second = list(program.weights)[:2]
    return replace(program, weights={**program.weights, second: program.weights[first]})


def used_before_defined(program: Program) -> Program:
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    calls[-1].append(calls[0])
    return program


def method_call(program: Program) -> Program:
    node = next(n for n in program.graph.nodes if n.target == aten.mul.Tensor)
    with program.graph.inserting_before(node):
        called = program.graph.call_method("abs", (node.args[0],))
    called.meta["val"] = node.args[0].meta["val"]  # type: ignore[union-attr]
    return program


FAULTS: dict[Callable[[Program], Program], str] = {
    wrong_dtype: "transition_scores",
    wrong_shape: "tokens",
    missing_output: "outputs",
    unknown_namespace: "prims.mul",
    no_recorded_shape: "no recorded shape",
    lost_input: "inputs",
    weight_without_placeholder: "p_ghost",
    weight_bound_twice: "one weight bound twice",
    used_before_defined: "graph",
    method_call: "call_method",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_verifier_names_the_pass_and_the_place(fault: Callable[[Program], Program]) -> None:
    program = apply_passes(traced("plain")["draft"], "portable")
    with pytest.raises(BuildError) as caught:
        verify(fault(program), "that_pass")
    assert "after pass 'that_pass'" in str(caught.value) and FAULTS[fault] in str(caught.value)


@pytest.mark.parametrize(
    ("operator", "first", "second", "named"),
    [
        # Sizes are taken from the first operand that has them, so the blame falls on the first that disagrees.
        (ADJACENT_INJECTION, 3, 7, "anchor_message"),  # [m, r] against [d, m]
        (ADJACENT_INJECTION, 0, 1, "message_weight"),  # [N, B, d] against [N, B, r]
        (ADJACENT_INJECTION, 5, 6, "predecessor_gate_weight"),  # ranks differ
        (TRANSITION_SCORES, 2, 3, "anchor_ids"),
        (TRANSITION_SCORES, 4, 7, "token_table"),  # [V, 2m] against [V, d]
    ],
)
def test_verifier_checks_operands_of_our_operators(operator: OpSchema, first: int, second: int, named: str) -> None:
    program = apply_passes(traced("plain")["draft"], "fused")
    node = next(n for n in program.graph.nodes if n.target == overload(operator))
    arguments = list(node.args)
    arguments[first], arguments[second] = arguments[second], arguments[first]
    node.args = tuple(arguments)
    with pytest.raises(BuildError) as caught:
        verify(program, "fuse_something")
    assert "after pass 'fuse_something'" in str(caught.value) and f".{named}" in str(caught.value)


def test_verifier_checks_operand_types() -> None:
    program = apply_passes(traced("plain")["draft"], "fused")
    node = next(n for n in program.graph.nodes if n.target == overload(TRANSITION_SCORES))
    with program.graph.inserting_before(node):
        node.update_arg(3, emit(program.graph, aten.to.dtype, node.args[3], torch.int32))
    with pytest.raises(BuildError, match=r"candidate_ids"):
        verify(program, "any")


def test_a_broken_pass_is_named_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pipeline.PIPELINES, "portable", (*PORTABLE, missing_output))
    with pytest.raises(BuildError, match="after pass 'missing_output'"):
        apply_passes(traced("plain")["draft"], "portable")


def test_capture_is_verified_before_any_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "from_traced", lambda entry: unknown_namespace(from_traced(entry)))
    with pytest.raises(BuildError, match="after pass 'capture'"):
        apply_passes(traced("plain")["draft"], "portable")


# --- the torch side of the operators


@pytest.mark.parametrize("schema", OPS, ids=lambda schema: schema.op_type)
def test_torch_declaration(schema: OpSchema) -> None:
    registered = overload(schema)._schema
    assert [a.name for a in registered.arguments] == [*(o.name for o in schema.inputs), *schema.attributes]
    assert len(registered.returns) == len(schema.outputs)
    assert declaration(schema) in str(registered).replace(f"{DOMAIN}::", "")


def test_fake_kernels_agree_with_the_real_ones() -> None:
    """Shapes and dtypes the tracer sees against those that come out."""
    sizes = {"N": 2, "B": 6, "B-1": 5, "d": 48, "r": 16, "m": 8, "2*m": 16, "K": 4, "V": 200}
    for schema in OPS:
        operands = [
            torch.zeros([sizes[s] for s in o.shape], dtype=torch.float32 if o.dtype == "T" else getattr(torch, o.dtype))
            for o in schema.inputs
        ]
        assert bind_dimensions(schema, [tuple(o.shape) for o in operands]).items() <= sizes.items()
        real = overload(schema)(*operands, *(1e-6 for _ in schema.attributes))
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(o) for o in operands]
            fake = overload(schema)(*fakes, *(1e-6 for _ in schema.attributes))
        for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (real, fake)), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
