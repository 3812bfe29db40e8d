"""Fusion: subgraphs equal to an operator's reference become that operator.

A pattern is the reference itself, exported at the drafter's own sizes and dtype, so it cannot drift from the model: what the model
computes is what is matched.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.utils.matcher_utils import InternalMatch, SubgraphMatcher

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.ops_schema import ADJACENT_INJECTION, LATTICE_WALK, TRANSITION_SCORES, OpSchema
from dspine_export.passes.cleanup import drop_unused_weights, eliminate_dead, remove_noise
from dspine_export.passes.program import Program, emit
from dspine_export.passes.torch_ops import REFERENCES, overload


def fuse_adjacent_injection(program: Program) -> Program:
    """Every layer's gated adjacent injection -> ``dspine::adjacent_injection``."""
    return _fuse(program, ADJACENT_INJECTION, {})


def fuse_transition(program: Program) -> Program:
    """The transition cache -> ``dspine::transition_scores``, the walk over it -> ``dspine::lattice_walk``."""
    program = _fuse(program, LATTICE_WALK, {})
    return _fuse(program, TRANSITION_SCORES, {"eps": program.config.rms_norm_eps})


def _fuse(program: Program, schema: OpSchema, attributes: Mapping[str, float]) -> Program:
    program = program.copy()
    if program.config.transfer is None:
        return program
    pattern = reference_pattern(schema, program.config, program.dtype, attributes)
    for match in SubgraphMatcher(pattern.graph, ignore_literals=False).match(program.graph):
        _replace(program.graph, match, schema, attributes)
    eliminate_dead(program.graph)
    return drop_unused_weights(program)


def operand_sizes(config: DrafterConfig, batch: int) -> dict[str, int]:
    """Values of the schema's symbolic dimensions for a drafter."""
    assert config.transfer is not None
    m = config.transfer.message_size
    return {
        "N": batch,
        "B": config.block_size,
        "B-1": config.block_size - 1,
        "d": config.hidden_size,
        "r": config.transfer.rank,
        "m": m,
        "2*m": 2 * m,
        "K": config.transfer.top_k,
        "V": config.vocab_size,
    }


def export_reference(
    schema: OpSchema, config: DrafterConfig, dtype: torch.dtype, attributes: Mapping[str, float]
) -> torch.export.ExportedProgram:
    """An operator's reference, traced once per sizes and dtype: fusion and the ONNX function bodies both need it."""
    return _trace_reference(schema, tuple(operand_sizes(config, 3).items()), dtype, tuple(attributes.values()))


@functools.lru_cache(maxsize=16)
def _trace_reference(
    schema: OpSchema, dimensions: tuple[tuple[str, int], ...], dtype: torch.dtype, attributes: tuple[float, ...]
) -> torch.export.ExportedProgram:
    """An operator's reference as an ExportedProgram with dynamic batch; inputs are the schema's operands in order."""
    sizes = dict(dimensions)
    batch = Dim("batch", min=1)
    shapes = tuple({0: batch} if operand.shape[0] == "N" else {} for operand in schema.inputs)
    with FakeTensorMode(shape_env=ShapeEnv()):
        operands = tuple(
            torch.zeros([sizes[s] for s in o.shape], dtype=dtype if o.dtype == "T" else getattr(torch, o.dtype))
            for o in schema.inputs
        )
    module = _Call(REFERENCES[schema.torch_name], attributes)
    return torch.export.export(module, operands, dynamic_shapes=(shapes,), strict=False)


def reference_pattern(
    schema: OpSchema, config: DrafterConfig, dtype: torch.dtype, attributes: Mapping[str, float]
) -> fx.GraphModule:
    """The pattern to look for, cleaned exactly as programs are."""
    module = copy.deepcopy(export_reference(schema, config, dtype, attributes).graph_module)
    remove_noise(module.graph)
    return module


class _Call(nn.Module):
    def __init__(self, function: Callable[..., Any], attributes: tuple[float, ...]) -> None:
        super().__init__()
        self.function, self.attributes = function, attributes

    def forward(self, *operands: Tensor) -> Any:
        return self.function(*operands, *self.attributes)


def _replace(graph: fx.Graph, match: InternalMatch, schema: OpSchema, attributes: Mapping[str, float]) -> None:
    matched = set(match.nodes_map.values()) - set(match.placeholder_nodes)
    last = next(node for node in reversed(graph.nodes) if node in matched)
    with graph.inserting_after(last):
        fused = emit(graph, overload(schema), *match.placeholder_nodes, *attributes.values())
    outputs = [fused]
    if len(schema.outputs) > 1:
        outputs = []
        anchor = fused
        for index in range(len(schema.outputs)):
            with graph.inserting_after(anchor):
                anchor = emit(graph, operator.getitem, fused, index)
            outputs.append(anchor)
    for old, new in zip(match.returning_nodes, outputs, strict=True):
        old.replace_all_uses_with(new)
