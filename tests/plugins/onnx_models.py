"""Hand-written ONNX models of one plugin node each, with a dynamic batch."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from dspine_export.ops_schema import DOMAIN, OPS, Operand, OpSchema

SIZES = {"B": 8, "d": 64, "r": 48, "m": 32, "K": 5, "V": 50}
COMPUTE = {"float32": TensorProto.FLOAT, "bfloat16": TensorProto.BFLOAT16}
FIXED = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}


def _value(operand: Operand, compute: int) -> onnx.ValueInfoProto:
    shape = ["N" if dim == "N" else eval(dim, {}, dict(SIZES)) for dim in operand.shape]
    return helper.make_tensor_value_info(operand.name, FIXED.get(operand.dtype, compute), shape)


def model_of(
    op: OpSchema, dtype: str, *, domain: str = DOMAIN, function_body: bool = False, **attributes: object
) -> onnx.ModelProto:
    """A model whose only node is `op`; `attributes` are added to the node, None removes one."""
    compute = COMPUTE[dtype]
    wanted = {**dict.fromkeys(op.attributes, 1e-6), **attributes}
    node = helper.make_node(
        op.op_type,
        [operand.name for operand in op.inputs],
        [operand.name for operand in op.outputs],
        domain=domain,
        **{name: value for name, value in wanted.items() if value is not None},
    )
    graph = helper.make_graph(
        [node],
        op.op_type,
        [_value(item, compute) for item in op.inputs],
        [_value(item, compute) for item in op.outputs],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(domain, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    if function_body:
        identity = helper.make_node("Identity", [op.inputs[0].name], [op.outputs[0].name])
        names = [operand.name for operand in op.inputs]
        body = helper.make_function(
            domain, op.op_type, names, [op.outputs[0].name], [identity], opsets[:1], list(op.attributes)
        )
        model.functions.append(body)
    return model


def write_models(directory: Path) -> None:
    """Every operator in both dtypes, and the variants of the namespace tests."""
    for op in OPS:
        for dtype in COMPUTE:
            model = model_of(op, dtype)
            onnx.checker.check_model(model)
            onnx.save(model, directory / f"{op.op_type}.{dtype}.onnx")
    injection, transition = OPS[0], OPS[1]
    named = {"plugin_namespace": DOMAIN, "plugin_version": "1"}
    onnx.save(model_of(injection, "float32", **named), directory / "attributes.onnx")
    onnx.save(model_of(injection, "float32", domain="other", **named), directory / "other_domain_attributes.onnx")
    onnx.save(model_of(injection, "float32", domain="other"), directory / "other_domain.onnx")
    onnx.save(model_of(injection, "float32", function_body=True), directory / "function_body.onnx")
    onnx.save(model_of(transition, "float32", eps=None), directory / "no_eps.onnx")


if __name__ == "__main__":
    write_models(Path(sys.argv[1]))
