"""Translations of torch operators the exporter lacks, and the domain ``dspine`` on the ONNX side: schemas and function bodies.

A function body is the operator's torch reference, exported by the same exporter as the model, so that any ONNX Runtime can execute a
fused model and what it executes is the specification. TensorRT uses the plugins instead; the bodies are stripped before it parses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnxscript import opset23, values

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.lowering.exporter import export_to_ir
from dspine_export.ops_schema import ADJACENT_INJECTION, DOMAIN, LATTICE_WALK, OPS, TRANSITION_SCORES, VERSION, OpSchema
from dspine_export.passes.fuse import export_reference
from dspine_export.passes.torch_ops import overload

_ONNX_TYPES = {"T": "T", "float32": "tensor(float)", "int64": "tensor(int64)"}


@functools.cache
def translation_table() -> dict[Any, Callable[..., Any]]:
    """What `export_to_ir` needs besides the exporter's own translations; registers the schemas of our operators once."""
    return {**_composite_operators(), **_own_operators()}


# The exporter reads the signatures of translations, so they are spelled out.


def _composite_operators() -> dict[Any, Callable[..., Any]]:
    """Operators the exporter would otherwise re-trace the whole program to decompose, or reshape by computed shapes."""

    def to_dtype(x, dtype: int, non_blocking: bool = False, copy: bool = False):  # type: ignore[no-untyped-def]
        return opset23.Cast(x, to=dtype)

    def logical_and(x, y):  # type: ignore[no-untyped-def]
        return opset23.And(x, y)

    def unflatten(x, dim: int, sizes: Sequence[int]):  # type: ignore[no-untyped-def]
        kept = dim % len(x.shape)
        return opset23.Reshape(x, _shape([0] * kept + list(sizes)))

    def flatten(x, start_dim: int = 0, end_dim: int = -1):  # type: ignore[no-untyped-def]
        kept = start_dim % len(x.shape)
        return opset23.Reshape(x, _shape([0] * kept + [-1]))

    aten = torch.ops.aten
    return {
        aten.to.dtype: to_dtype,
        aten.__and__.Tensor: logical_and,
        aten.unflatten.int: unflatten,
        aten.flatten.using_ints: flatten,
    }


def _shape(sizes: list[int]) -> Any:
    """The constant shape operand of a Reshape, in which 0 keeps a dimension."""
    return opset23.Constant(value_ints=sizes)


def _own_operators() -> dict[Any, Callable[..., Any]]:
    for schema in OPS:
        onnx.defs.register_schema(_onnx_schema(schema))
    opset = values.Opset(DOMAIN, VERSION)

    def adjacent_injection(hidden, feature, anchor, message, receiver_gate, predecessor_gate, bias, write):  # type: ignore[no-untyped-def]
        return opset.AdjacentInjection(hidden, feature, anchor, message, receiver_gate, predecessor_gate, bias, write)

    def transition_scores(pre, receiver_gate, anchors, candidates, table, write, norm, lm_head, eps: float):  # type: ignore[no-untyped-def]
        return opset.TransitionScores(pre, receiver_gate, anchors, candidates, table, write, norm, lm_head, eps=eps)

    def lattice_walk(scores, candidates, temperature, uniforms):  # type: ignore[no-untyped-def]
        return opset.LatticeWalk(scores, candidates, temperature, uniforms)

    return {
        overload(ADJACENT_INJECTION): adjacent_injection,
        overload(TRANSITION_SCORES): transition_scores,
        overload(LATTICE_WALK): lattice_walk,
    }


def _onnx_schema(schema: OpSchema) -> onnx.defs.OpSchema:
    kind = onnx.defs.OpSchema
    generic = any(operand.dtype == "T" for operand in schema.inputs)
    return kind(
        schema.op_type,
        DOMAIN,
        VERSION,
        doc=schema.doc,
        inputs=[kind.FormalParameter(o.name, _ONNX_TYPES[o.dtype]) for o in schema.inputs],
        outputs=[kind.FormalParameter(o.name, _ONNX_TYPES[o.dtype]) for o in schema.outputs],
        type_constraints=[("T", ["tensor(float)", "tensor(bfloat16)"], "compute type")] if generic else [],
        attributes=[kind.Attribute(name, kind.AttrType.FLOAT, "") for name in schema.attributes],
    )


def attach_function_bodies(model: ir.Model, config: DrafterConfig, dtype: torch.dtype) -> None:
    """Adds a body for every ``dspine`` operator the model uses."""
    used = {node.op_type for node in model.graph if node.domain == DOMAIN}
    for schema in OPS:
        if schema.op_type in used:
            function = _function(schema, config, dtype)
            model.functions[function.identifier()] = function


def _function(schema: OpSchema, config: DrafterConfig, dtype: torch.dtype) -> ir.Function:
    attributes = dict.fromkeys(schema.attributes, config.rms_norm_eps)
    reference = export_reference(schema, config, dtype, attributes)
    body = export_to_ir(reference, [o.name for o in schema.outputs], translation_table())
    graph = body.graph
    for name, value in list(graph.initializers.items()):  # functions have no initialisers
        constant = ir.node("Constant", [], attributes={"value": value.const_value})
        constant.outputs[0].name = f"{name}_constant"
        graph.insert_before(graph[0], constant)
        ir.convenience.replace_all_uses_with(value, constant.outputs[0])
        del graph.initializers[name]
    if "eps" in attributes:
        _refer_to_attribute(graph, "RMSNormalization", "epsilon", "eps")
    declared = [ir.Attr(name, ir.AttributeType.FLOAT, None) for name in attributes]
    graph.opset_imports.update(body.opset_imports)
    return ir.Function(DOMAIN, schema.op_type, graph=graph, attributes=declared)


def _refer_to_attribute(graph: ir.Graph, op_type: str, inner: str, outer: str) -> None:
    """The body of an operator takes a value from the node that calls it, as the plugin does."""
    for node in graph:
        if node.op_type == op_type:
            node.attributes[inner] = ir.RefAttr(inner, outer, ir.AttributeType.FLOAT)
