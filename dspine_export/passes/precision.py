"""`precision_policy`: which operators must work in float32 whatever the compute dtype, and leave for TensorRT to split attention.

Strongly typed TensorRT takes precision from the graph alone, so the policy is a rewrite and not a builder flag. GEMMs and attention
stay in the compute dtype (they accumulate in float32); sums of squares, roots, angles, softmax, the choice of candidates and the walk
do not: hidden states of the supported targets exceed 2e4, whose square no half type holds.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from dspine_export.ops_schema import LATTICE_WALK
from dspine_export.passes.program import Program, emit
from dspine_export.passes.torch_ops import overload

aten = torch.ops.aten
HALF_TYPES = (torch.bfloat16, torch.float16)

FLOAT32_OPS = frozenset(
    {
        aten.topk.default,
        aten.softmax.int,
        aten.cumsum.default,
        aten.argmax.default,
        aten.sum.dim_IntList,
        aten.pow.Tensor_Scalar,
        aten.sqrt.default,
        aten.cos.default,
        aten.sin.default,
        overload(LATTICE_WALK),
    }
)


def precision_policy(program: Program) -> Program:
    """Casts half-precision operands of the listed operators to float32, and their results back where the graph was typed so."""
    program = program.copy()
    for node in list(program.graph.nodes):
        if node.target in FLOAT32_OPS:
            _widen(program.graph, node)
    return program


def _widen(graph: fx.Graph, node: fx.Node) -> None:
    narrow = [a for a in node.args if isinstance(a, fx.Node) and a.meta["val"].dtype in HALF_TYPES]
    if not narrow:
        return
    before = node.meta["val"]
    for argument in narrow:
        with graph.inserting_before(node):
            node.replace_input_with(argument, emit(graph, aten.to.dtype, argument, torch.float32))
    fakes = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    node.meta["val"] = node.target(*fakes, **node.kwargs)  # type: ignore[operator]
    _narrow_results(graph, node, before)


def _narrow_results(graph: fx.Graph, node: fx.Node, before: object) -> None:
    """Keeps the dtype every user of `node` was traced with."""
    results = (
        [(u, u.meta["val"]) for u in node.users if u.op == "call_function"]
        if isinstance(before, (tuple, list))
        else [(node, before)]
    )
    for result, old in results:
        if not isinstance(old, torch.Tensor):
            continue
        if result is not node:
            result.meta["val"] = node.meta["val"][result.args[1]]
        if result.meta["val"].dtype == old.dtype:
            continue
        users = list(result.users)
        with graph.inserting_after(result):
            back = emit(graph, aten.to.dtype, result, old.dtype)
        for user in users:
            user.replace_input_with(result, back)


def mark_decomposable_attention(program: Program) -> Program:
    """float32 attention has no fused TensorRT kernel: without leave to decompose it the build fails late, or not at all elsewhere."""
    has_attention = any(node.target == aten.scaled_dot_product_attention.default for node in program.graph.nodes)
    return replace(program.copy(), decomposable_attention=has_attention and program.dtype == torch.float32)
