"""ExportedProgram -> optimised ONNX IR, without ever reading a weight."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import optimizer

from dspine_export.errors import BuildError

OPSET = 23


def export_to_ir(
    program: torch.export.ExportedProgram, output_names: Sequence[str], table: Mapping[Any, Callable[..., Any]]
) -> ir.Model:
    """Translates and optimises a program; initialisers of weights come out without values, to be attached by the caller.

    Raises:
        BuildError: the exporter has no translation for something in the program.
    """
    for noisy in (
        "torch.onnx",
        "onnx_ir.passes",
    ):  # both report what is intended here: no torchvision, weights without values
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.onnx.export(
                _final(program),
                dynamo=True,
                opset_version=OPSET,
                custom_translation_table=dict(table) or None,
                output_names=list(output_names),
                optimize=False,
                verbose=False,
            )
    except Exception as error:
        raise BuildError("The ONNX exporter could not translate the graph", got=str(error)[:2000]) from error
    assert exported is not None
    model = exported.model
    hide_weights(model)
    # Folding works on constants of the graph; weights carry no value here, so nothing can be folded into, or out of, them.
    optimizer.optimize_ir(model, inline=True)
    strip_provenance(model)
    return model


class _FinalProgram(torch.export.ExportedProgram):
    """A program of operators that all have a translation.

    The exporter decomposes what it is given by tracing it once more, which takes a third of an export and here changes nothing.
    """

    def run_decompositions(self, *_: object, **__: object) -> torch.export.ExportedProgram:
        return self


def _final(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same program on a graph of its own, for the exporter edits what it translates."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    return _FinalProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def hide_weights(model: ir.Model) -> None:
    """Detaches fake values. An optimiser that compares values would otherwise merge weights that merely look alike."""
    for value in model.graph.initializers.values():
        if isinstance(getattr(value.const_value, "raw", None), torch._subclasses.FakeTensor):
            value.const_value = None


def strip_provenance(model: ir.Model) -> None:
    """Forgets where each node came from: the exporter records source files and stack traces of the machine it ran on."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.doc_string = None
        node.metadata_props.clear()
    values = (output for node in ir.traversal.RecursiveGraphIterator(model.graph) for output in node.outputs)
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *values):
        value.metadata_props.clear()


def rename_dimensions(model: ir.Model, names: Mapping[str, str]) -> None:
    """Gives dynamic dimensions their contract names wherever they appear, in sums too."""

    def renamed(shape: ir.Shape | None) -> ir.Shape | None:
        if shape is None:
            return None
        return ir.Shape([_rename(dim.value, names) if isinstance(dim, ir.SymbolicDim) else dim for dim in shape])

    for value in [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]:
        value.shape = renamed(value.shape)


def _rename(dimension: str | None, names: Mapping[str, str]) -> str | None:
    if dimension is None:
        return None
    return " ".join(names.get(word, word) for word in dimension.split(" "))
