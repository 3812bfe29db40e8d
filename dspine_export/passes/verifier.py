"""What must hold between passes. A violation names the pass that caused it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from dspine_export.capture.entries import TensorSpec
from dspine_export.errors import BuildError
from dspine_export.ops_schema import DOMAIN, OPS, Operand
from dspine_export.passes.program import Program
from dspine_export.passes.torch_ops import bind_dimensions


def verify(program: Program, after: str) -> None:
    """Checks graph form, weights, contract, operators and the operands of our own operators.

    Raises:
        BuildError: naming the pass and the offending node.
    """
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise _violation(after, "graph", str(error), "a well-formed graph") from error
    _verify_placeholders(program, after)
    _verify_outputs(program, after)
    for node in program.graph.nodes:
        if node.op == "call_function":
            _verify_call(node, after)
        elif node.op not in ("placeholder", "output"):
            raise _violation(after, node.name, node.op, "placeholder, call_function or output")


def _violation(after: str, where: str, got: Any, expected: Any) -> BuildError:
    return BuildError(f"The graph is not valid after pass {after!r}", where=where, got=got, expected=expected)


def _verify_placeholders(program: Program, after: str) -> None:
    names = [node.name for node in program.placeholders()]
    inputs = [name for name in names if name not in program.weights]
    expected = [spec.name for spec in program.contract.inputs]
    if inputs != expected:
        raise _violation(after, "inputs", inputs, expected)
    missing = set(program.weights) - set(names)
    if missing or len(set(program.weights.values())) != len(program.weights):
        raise _violation(after, "weights", sorted(missing) or "one weight bound twice", "one placeholder per weight")


def _verify_outputs(program: Program, after: str) -> None:
    outputs, specs = program.output_nodes(), program.contract.outputs
    if after != "capture" and len(outputs) != len(specs):
        raise _violation(after, "outputs", len(outputs), len(specs))
    for node, spec in zip(outputs, specs, strict=False):
        _verify_value(node.meta["val"], spec, program.dtype, after)


def _verify_value(value: torch.Tensor, spec: TensorSpec, compute: torch.dtype, after: str) -> None:
    dtype = compute if spec.dtype == "T" else getattr(torch, spec.dtype)
    static = [(want, got) for want, got in zip(spec.shape, value.shape, strict=False) if isinstance(want, int)]
    if value.dtype != dtype or value.ndim != len(spec.shape) or any(want != got for want, got in static):
        raise _violation(after, spec.name, f"{value.dtype} {list(value.shape)}", f"{dtype} {list(spec.shape)}")


def _verify_call(node: fx.Node, after: str) -> None:
    if "val" not in node.meta:
        raise _violation(after, node.name, "no recorded shape", "meta['val'] on every node")
    if node.target is operator.getitem:
        return
    namespace = getattr(node.target, "namespace", None)
    if namespace not in ("aten", DOMAIN):
        raise _violation(after, node.name, str(node.target), f"an operator of aten or {DOMAIN}")
    if namespace == DOMAIN:
        _verify_operands(node, after)


def _verify_operands(node: fx.Node, after: str) -> None:
    schema = next(s for s in OPS if s.torch_name == node.target._schema.name.split("::")[1])  # type: ignore[union-attr]
    values = [a.meta["val"] for a in node.args[: len(schema.inputs)] if isinstance(a, fx.Node)]
    if len(values) != len(schema.inputs):
        raise _violation(after, node.name, f"{len(values)} tensors", f"{len(schema.inputs)} tensors")
    for value, operand in zip(values, schema.inputs, strict=True):
        if value.ndim != len(operand.shape):
            raise _bad_operand(node, value, operand, after)
    compute = {v.dtype for v, o in zip(values, schema.inputs, strict=True) if o.dtype == "T"}
    sizes = bind_dimensions(schema, [tuple(v.shape) for v in values])
    if "m" in sizes:
        sizes["2*m"] = 2 * sizes["m"]
    for value, operand in zip(values, schema.inputs, strict=True):
        shape = [sizes[symbol] for symbol in operand.shape]
        typed = len(compute) == 1 if operand.dtype == "T" else value.dtype == getattr(torch, operand.dtype)
        static = [(w, g) for w, g in zip(shape, value.shape, strict=True) if isinstance(w, int) and isinstance(g, int)]
        if not typed or any(want != got for want, got in static):
            raise _bad_operand(node, value, operand, after)


def _bad_operand(node: fx.Node, value: torch.Tensor, operand: Operand, after: str) -> BuildError:
    got, expected = f"{value.dtype} {list(value.shape)}", f"{operand.dtype} {list(operand.shape)}"
    return _violation(after, f"{node.name}.{operand.name}", got, expected)
