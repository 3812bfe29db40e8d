"""`precision_policy` and `mark_decomposable_attention`."""

from __future__ import annotations

import operator

import pytest
import torch

from dspine_export.passes.cleanup import drop_training_only
from dspine_export.passes.precision import FLOAT32_OPS, mark_decomposable_attention, precision_policy
from dspine_export.passes.program import Program, from_traced
from dspine_export.passes.verifier import verify
from tests.programs import assert_drafts_like_eager, count, drafter_of, fingerprint, synthetic, traced

aten = torch.ops.aten
bf16 = torch.bfloat16


def risky(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums of squares, a softmax and a choice, all written in the compute type, and two GEMMs."""
    y = x @ w
    length = y.pow(2).sum(-1, keepdim=True).sqrt()
    values, ids = torch.topk(torch.softmax(y, -1), 2, dim=-1)
    return y / length, values, ids


@pytest.fixture(scope="module")
def half() -> Program:
    return synthetic(risky, torch.randn(3, 4).to(bf16), torch.randn(4, 5).to(bf16), dtype=bf16)


def operand_types(program: Program) -> dict[str, set[torch.dtype]]:
    types: dict[str, set[torch.dtype]] = {}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            found = types.setdefault(str(node.target), set())
            found |= {a.meta["val"].dtype for a in node.args if isinstance(a, torch.fx.Node)}
    return types


def test_hit(half: Program) -> None:
    after = precision_policy(half)
    verify(after, "precision_policy")
    types = operand_types(after)
    for name in (
        "aten.pow.Tensor_Scalar",
        "aten.sum.dim_IntList",
        "aten.sqrt.default",
        "aten.softmax.int",
        "aten.topk.default",
    ):
        assert types[name] == {torch.float32}, name
    outputs = [node.meta["val"].dtype for node in after.output_nodes()]
    assert outputs == [bf16, bf16, torch.int64]  # the contract's types


def test_near_miss(half: Program) -> None:
    """GEMMs and elementwise operators stay in the compute type; float32 operands are not touched."""
    types = operand_types(precision_policy(half))
    assert types["aten.matmul.default"] == {bf16} and types["aten.div.Tensor"] == {bf16}
    wide = synthetic(risky, torch.randn(3, 4), torch.randn(4, 5))
    assert fingerprint(precision_policy(wide)) == fingerprint(wide)


def test_recorded_shapes_are_what_comes_out(half: Program) -> None:
    """meta['val'] agrees with a fresh evaluation of every node."""
    program = precision_policy(half)
    for node in program.graph.nodes:
        if node.op == "call_function":
            args = torch.fx.node.map_arg(node.args, lambda n: n.meta["val"])
            fresh, recorded = node.target(*args, **node.kwargs), node.meta["val"]
            for a, b in zip(
                torch.utils._pytree.tree_leaves(fresh), torch.utils._pytree.tree_leaves(recorded), strict=True
            ):
                assert (a.dtype, a.shape) == (b.dtype, b.shape), node


def test_idempotent_and_pure(half: Program) -> None:
    before = fingerprint(half)
    once = precision_policy(half)
    assert fingerprint(half) == before
    assert fingerprint(precision_policy(once)) == fingerprint(once)


def test_numeric(half: Program) -> None:
    """The graph after the pass follows float32 more closely: here a sum of squares that bfloat16 swallows."""
    x = torch.cat((torch.full((3, 1), 256.0), torch.ones(3, 3)), dim=-1).to(bf16)
    w = torch.eye(4, 5).to(bf16)
    names = [spec.name for spec in half.contract.inputs]
    after = precision_policy(half).run({}, dict(zip(names, (x, w), strict=True)))
    want = risky(x.float(), w.float())
    torch.testing.assert_close(after["out0"].float(), want[0], rtol=8e-3, atol=0)
    assert torch.equal(after["out2"], want[2])


def test_drafter_in_bfloat16() -> None:
    """The traced model obeys the policy already, and the pass makes sure of it."""
    program = precision_policy(drop_training_only(from_traced(traced("smallest", bf16)["draft"])))
    verify(program, "precision_policy")
    for node in program.graph.nodes:
        if node.target in FLOAT32_OPS:
            floats = [a.meta["val"].dtype for a in node.args if isinstance(a, torch.fx.Node)]
            assert bf16 not in floats, node


def test_drafter_in_float32_is_unchanged() -> None:
    program = drop_training_only(from_traced(traced("plain")["draft"]))
    after = precision_policy(program)
    assert fingerprint(after) == fingerprint(program)
    assert_drafts_like_eager(after, drafter_of("plain"), [2, 0], 3)


def test_decomposable_attention() -> None:
    """Leave to decompose is for float32 attention alone."""
    wide, context = from_traced(traced("plain")["draft"]), from_traced(traced("plain")["context"])
    narrow = from_traced(traced("smallest", bf16)["draft"])
    marked = mark_decomposable_attention(wide)
    assert marked.decomposable_attention and not wide.decomposable_attention
    assert fingerprint(marked) == fingerprint(wide)
    assert mark_decomposable_attention(marked).decomposable_attention
    assert not mark_decomposable_attention(narrow).decomposable_attention
    assert not mark_decomposable_attention(context).decomposable_attention
    assert count(wide, aten.scaled_dot_product_attention.default) == wide.config.num_layers
