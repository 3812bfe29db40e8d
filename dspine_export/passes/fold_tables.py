"""`fold_transfer_tables`: M sqrt(r) c_v and G_p sqrt(r) c_v depend on the token alone, so one table [V, 2m] replaces the codes.

Rewrites ``linear(mul(embedding(transfer_codes, ids), sqrt(r)), W)`` for W in {M, G_p} into a slice of ``embedding(token_table, ids)``
and joins adjacent slices again. Same bytes in memory when 2m = r, and two GEMMs fewer per candidate row.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import torch
from torch import fx

from dspine_export.passes.cleanup import drop_unused_weights, eliminate_dead
from dspine_export.passes.program import Program, emit

aten = torch.ops.aten

TOKEN_TABLE = "token_table"
CODES = "transfer_codes"
MESSAGE, PREDECESSOR_GATE = "injection.message.weight", "injection.predecessor_gate.weight"


def fold_transfer_tables(program: Program) -> Program:
    """Folds every projection of a known token's feature; does nothing to a program without transfer codes."""
    program = program.copy()
    codes = program.weight_node(CODES)
    if codes is None or program.config.transfer is None:
        return program
    transfer = program.config.transfer
    projections = {
        program.weight_node(MESSAGE): (0, transfer.message_size),
        program.weight_node(PREDECESSOR_GATE): (transfer.message_size, sys.maxsize),
    }
    foldable = [
        node for node in program.graph.nodes if _is_projection(node, codes, projections, math.sqrt(transfer.rank))
    ]
    if not foldable:
        return program
    program, table = _add_table(program, codes)
    rows: dict[fx.Node, fx.Node] = {}
    for node in foldable:
        _fold(program.graph, node, table, rows, *projections[node.args[1]])
    _join_slices(program.graph)
    eliminate_dead(program.graph)
    return drop_unused_weights(program)


def _is_projection(node: fx.Node, codes: fx.Node, weights: dict[fx.Node | None, tuple[int, int]], scale: float) -> bool:
    if node.target != aten.linear.default or len(node.args) != 2 or node.args[1] not in weights:
        return False
    feature = node.args[0]
    if not isinstance(feature, fx.Node) or feature.target != aten.mul.Tensor or feature.args[1] != scale:
        return False
    gather = feature.args[0]
    return isinstance(gather, fx.Node) and gather.target == aten.embedding.default and gather.args[0] is codes


def _add_table(program: Program, codes: fx.Node) -> tuple[Program, fx.Node]:
    assert program.config.transfer is not None
    with program.graph.inserting_after(codes):
        table = program.graph.placeholder(f"p_{TOKEN_TABLE}")
    shape = (program.config.vocab_size, 2 * program.config.transfer.message_size)
    table.meta["val"] = codes.meta["val"].new_empty(shape)
    return replace(program, weights={**program.weights, table.name: TOKEN_TABLE}), table


def _fold(graph: fx.Graph, node: fx.Node, table: fx.Node, rows: dict[fx.Node, fx.Node], start: int, end: int) -> None:
    feature = node.args[0]
    assert isinstance(feature, fx.Node)
    gather = feature.args[0]
    assert isinstance(gather, fx.Node)
    ids = gather.args[1]
    assert isinstance(ids, fx.Node)
    if ids not in rows:
        with graph.inserting_before(gather):
            rows[ids] = emit(graph, aten.embedding.default, table, ids)
    with graph.inserting_before(node):
        half = emit(graph, aten.slice.Tensor, rows[ids], rows[ids].meta["val"].ndim - 1, start, end)
    node.replace_all_uses_with(half)
    graph.erase_node(node)


def _join_slices(graph: fx.Graph) -> None:
    """cat(x[..., :m], x[..., m:2m]) is x when the slices cover it."""
    for node in list(graph.nodes):
        if node.target != aten.cat.default:
            continue
        parts = node.args[0]
        if len(parts) != 2 or any(p.target != aten.slice.Tensor or len(p.args) != 4 for p in parts):
            continue
        (source, axis, start, middle), (other, other_axis, other_start, end) = (p.args for p in parts)
        whole = source.meta["val"].shape[axis]
        same = (
            source is other
            and axis == other_axis == source.meta["val"].ndim - 1
            and start == 0
            and middle == other_start
        )
        if same and end >= whole and node.args[1] in (-1, axis):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
