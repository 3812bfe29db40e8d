"""`drop_training_only`: outputs outside the contract, checks of the tracer, casts that change nothing, and weights left without use."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import fx

from dspine_export.passes.program import Program

aten = torch.ops.aten


def drop_training_only(program: Program) -> Program:
    """Keeps what the contract returns. Training's aligned features, readouts after injection, go away with all that feeds them."""
    program = program.copy()
    kept = program.output_nodes()[: len(program.contract.outputs)]
    output = program.graph.output_node()
    output.args = (kept,)
    remove_noise(program.graph)
    return drop_unused_weights(program)


def remove_noise(graph: fx.Graph) -> None:
    """Removes metadata assertions, casts and slices that change nothing, and dead nodes, in place."""
    for node in list(graph.nodes):
        if node.target == aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    eliminate_dead(graph)


def _changes_nothing(node: fx.Node) -> bool:
    if node.target == aten.to.dtype:
        return bool(node.args[0].meta["val"].dtype == node.args[1])  # type: ignore[union-attr]
    return node.target == aten.slice.Tensor and len(node.args) == 4 and node.args[2:] == (0, sys.maxsize)


def eliminate_dead(graph: fx.Graph) -> None:
    """Removes calls without users; all operators here are pure. Placeholders stay."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def drop_unused_weights(program: Program) -> Program:
    """Forgets weight placeholders nobody reads. Contract inputs stay even when unused."""
    weights = dict(program.weights)
    for node in list(program.placeholders()):
        if node.name in weights and not node.users:
            del weights[node.name]
            program.graph.erase_node(node)
    return replace(program, weights=weights)
