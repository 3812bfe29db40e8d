"""Cutting a fused graph at our operators: plugin-free segments, each an ONNX model of its own, with the operator calls between them.

For hosts that execute standard operators only, and for measuring what such a host adds. Running the steps in order gives the graph's
outputs. Every node runs in the latest segment that all of its users allow, so that slices of inputs (a layer's keys) and small tables
are made where they are used instead of being carried from the first segment on.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from dspine_export.errors import BuildError
from dspine_export.ops_schema import DOMAIN

Value = onnx.ValueInfoProto


@dataclass(frozen=True)
class Segment:
    """Standard nodes between two operators. `model` reads the whole graph's external weights; names are those of the whole graph."""

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class OperatorCall:
    """One node of domain ``dspine``; inputs are computed values, graph inputs or initialisers."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, float]


def cut(model: onnx.ModelProto) -> list[Segment | OperatorCall]:
    """The steps of `model` in execution order.

    Raises:
        BuildError: a value that crosses a cut has no known type, or a node holds a subgraph.
    """
    operators, stage_of = _stages(model.graph)
    steps: list[Segment | OperatorCall] = []
    for stage in range(len(operators) + 1):
        nodes = [n for n in model.graph.node if n.domain != DOMAIN and stage_of[n.output[0]] == stage]
        if nodes:
            steps.append(_segment(model, nodes))
        if stage < len(operators):
            steps.append(_call(operators[stage]))
    return steps


def _stages(graph: onnx.GraphProto) -> tuple[list[onnx.NodeProto], dict[str, int]]:
    """The operators in order, and the segment in which each node (by its first output) runs; segment i precedes operator i."""
    operators = [node for node in graph.node if node.domain == DOMAIN]
    position = {output: i for i, node in enumerate(operators) for output in node.output}
    earliest: dict[str, int] = {}
    for node in graph.node:
        if any(attribute.HasField("g") for attribute in node.attribute):
            raise BuildError("A graph with subgraphs cannot be cut", where=node.name, got=node.op_type)
        after = max((earliest.get(name, 0) for name in node.input), default=0)
        for output in node.output:
            earliest[output] = position[output] + 1 if output in position else after
    latest: dict[str, int] = {}
    for node in reversed(graph.node):
        if node.domain == DOMAIN:
            stage = position[node.output[0]]
        else:
            stage = min(
                (latest[output] for output in node.output if output in latest), default=earliest[node.output[0]]
            )
            latest[node.output[0]] = stage
        for name in node.input:
            latest[name] = min(latest.get(name, stage), stage)
    return operators, latest


def _segment(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> Segment:
    graph = model.graph
    made = {output for node in nodes for output in node.output}
    read = dict.fromkeys(name for node in nodes for name in node.input if name and name not in made)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    inputs = [name for name in read if name not in weights]
    here = {id(node) for node in nodes}
    elsewhere = {name for node in graph.node if id(node) not in here for name in node.input}
    wanted = elsewhere | {value.name for value in graph.output}
    outputs = [output for node in nodes for output in node.output if output in wanted]
    types = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    missing = [name for name in (*inputs, *outputs) if name not in types]
    if missing:
        raise BuildError("Values at a cut have no known type", got=", ".join(missing), fix="infer shapes first")
    part = onnx.helper.make_graph(
        nodes,
        graph.name,
        [types[name] for name in inputs],
        [types[name] for name in outputs],
        [weights[name] for name in read if name in weights],
    )
    opsets = [opset for opset in model.opset_import if opset.domain != DOMAIN]
    result = onnx.helper.make_model(part, opset_imports=opsets, ir_version=model.ir_version)
    return Segment(result, tuple(inputs), tuple(outputs))


def _call(node: onnx.NodeProto) -> OperatorCall:
    attributes = {attribute.name: float(attribute.f) for attribute in node.attribute}
    return OperatorCall(node.op_type, tuple(node.input), tuple(node.output), attributes)
