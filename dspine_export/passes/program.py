"""`Program`: the graph the passes rewrite, free of torch.export's bookkeeping, and the ways in and out of it.

Weights are graph placeholders that carry the checkpoint's tensor name; inputs are placeholders that carry the contract's name. A pass
takes a Program and returns another one; `copy` keeps the original intact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils import _pytree as pytree

from dspine_export.capture.entries import EntryContract
from dspine_export.capture.trace import TracedEntry
from dspine_export.checkpoint.config import DrafterConfig

WEIGHT_PREFIX = "model."


@dataclass(frozen=True)
class Program:
    """One entry point as a graph.

    Attributes:
        graph: placeholders (weights, then contract inputs), calls, one output; every node's meta["val"] is a fake tensor.
        weights: placeholder name -> checkpoint tensor name (or the name of a derived tensor, such as ``token_table``).
        decomposable_attention: attention may be split into primitive layers (TensorRT needs leave to do so in float32).
    """

    graph: fx.Graph
    weights: Mapping[str, str]
    traced: TracedEntry
    decomposable_attention: bool = False

    @property
    def contract(self) -> EntryContract:
        return self.traced.contract

    @property
    def config(self) -> DrafterConfig:
        return self.traced.config

    @property
    def dtype(self) -> torch.dtype:
        return self.traced.dtype

    def copy(self, **changes: Any) -> Program:
        """The same program on a graph of its own."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return replace(self, graph=graph, **changes)

    def placeholders(self) -> Iterator[fx.Node]:
        return (node for node in self.graph.nodes if node.op == "placeholder")

    def weight_node(self, name: str) -> fx.Node | None:
        """The placeholder of a weight, or None where the graph does not use it."""
        return next((node for node in self.placeholders() if self.weights.get(node.name) == name), None)

    def output_nodes(self) -> tuple[fx.Node, ...]:
        return tuple(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def run(self, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Interprets the graph on real tensors. Slow; for tests and debugging."""
        values = [
            weights[self.weights[n.name]] if n.name in self.weights else inputs[n.name] for n in self.placeholders()
        ]
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        outputs = module(*values)
        return {spec.name: value for spec, value in zip(self.contract.outputs, outputs, strict=False)}


def from_traced(traced: TracedEntry) -> Program:
    """The exported graph with weights named as in the checkpoint."""
    signature = traced.program.graph_signature
    weights = {}
    for spec in signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            assert isinstance(spec.target, str)
            weights[spec.arg.name] = spec.target.removeprefix(WEIGHT_PREFIX)
    return Program(traced.program.graph, weights, traced).copy()


def to_exported(program: Program) -> torch.export.ExportedProgram:
    """Back to an ExportedProgram whose parameters are the (still fake) weights, for the ONNX exporter."""
    source = program.traced.program
    inputs: list[InputSpec] = []
    state: dict[str, Tensor | torch.nn.Parameter] = {}
    for node in program.placeholders():
        name = program.weights.get(node.name)
        kind = InputKind.USER_INPUT if name is None else InputKind.PARAMETER
        inputs.append(InputSpec(kind, TensorArgument(node.name), name))
        if name is not None:
            state[name] = torch.nn.Parameter(node.meta["val"], requires_grad=False)
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in program.output_nodes()]
    return torch.export.ExportedProgram(
        root=torch.nn.Module(),
        graph=program.copy().graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=state,
        range_constraints=source.range_constraints,
        module_call_graph=_call_graph(source, len(outputs)),
        example_inputs=source.example_inputs,
        verifiers=source.verifiers,
    )


def _call_graph(source: torch.export.ExportedProgram, outputs: int) -> list[ModuleCallEntry]:
    """The call signature, narrowed to the outputs the program still has."""
    signature = source.module_call_graph[0].signature
    assert signature is not None
    spec = pytree.tree_structure(tuple(range(outputs)))
    outer = ModuleCallSignature(
        signature.inputs, signature.outputs[:outputs], signature.in_spec, spec, signature.forward_arg_names
    )
    return [ModuleCallEntry("", outer)]


def emit(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call node with its fake value computed from its arguments'."""
    node = graph.call_function(target, args, kwargs)

    def value(argument: fx.Node) -> Any:
        return argument.meta["val"]

    fake_args, fake_kwargs = fx.node.map_arg(args, value), fx.node.map_arg(kwargs, value)
    node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node
