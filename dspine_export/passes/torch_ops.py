"""The three operators as torch.library ops, generated from `ops_schema`, with the eager model as their implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dspine_export.model.injection import inject
from dspine_export.model.transition import predecessor_ids, score_pairs, walk
from dspine_export.ops_schema import ADJACENT_INJECTION, DOMAIN, LATTICE_WALK, OPS, TRANSITION_SCORES, OpSchema


def score_lattice(
    pre_injection: Tensor,
    receiver_gate: Tensor,
    anchor_ids: Tensor,
    candidate_ids: Tensor,
    token_table: Tensor,
    write_weight: Tensor,
    norm_weight: Tensor,
    lm_head: Tensor,
    eps: float,
) -> Tensor:
    """Reference of ``dspine::transition_scores``: `score_pairs` on gathered rows of the folded token table [V, 2m]."""
    rows = torch.nn.functional.embedding(predecessor_ids(anchor_ids, candidate_ids), token_table)
    m = write_weight.shape[1]
    message, gate = rows[:, :, :, :m], rows[:, :, :, m:]
    return score_pairs(
        pre_injection, receiver_gate, message, gate, candidate_ids, write_weight, norm_weight, lm_head, eps
    )


REFERENCES: dict[str, Callable[..., Any]] = {
    ADJACENT_INJECTION.torch_name: inject,
    TRANSITION_SCORES.torch_name: score_lattice,
    LATTICE_WALK.torch_name: walk,
}


def declaration(schema: OpSchema) -> str:
    """The torch schema string of an operator."""
    arguments = [f"Tensor {operand.name}" for operand in schema.inputs] + [
        f"float {name}" for name in schema.attributes
    ]
    returns = ", ".join("Tensor" for _ in schema.outputs)
    return f"{schema.torch_name}({', '.join(arguments)}) -> {returns if len(schema.outputs) == 1 else f'({returns})'}"


def bind_dimensions(schema: OpSchema, shapes: list[tuple[Any, ...]]) -> dict[str, Any]:
    """Maps each symbolic dimension ("N", "2*m", ...) to its size, taking the first operand that names it."""
    sizes: dict[str, Any] = {}
    for operand, shape in zip(schema.inputs, shapes, strict=True):
        for symbol, size in zip(operand.shape, shape, strict=True):
            sizes.setdefault(symbol, size)
    return sizes


def _fake(schema: OpSchema) -> Callable[..., Any]:
    def fake(*operands: Any) -> Any:
        tensors = operands[: len(schema.inputs)]
        sizes = bind_dimensions(schema, [tuple(t.shape) for t in tensors])
        compute = next((t.dtype for t, o in zip(tensors, schema.inputs, strict=True) if o.dtype == "T"), torch.float32)
        outputs = [
            tensors[0].new_empty(
                [sizes[s] for s in out.shape], dtype=compute if out.dtype == "T" else getattr(torch, out.dtype)
            )
            for out in schema.outputs
        ]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return fake


def _contiguous(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Operators must not return views of their inputs."""

    def call(*operands: Any) -> Any:
        result = reference(*operands)
        return tuple(t.clone() for t in result) if isinstance(result, tuple) else result.clone()

    return call


_library = torch.library.Library(DOMAIN, "DEF")
for _schema in OPS:
    _library.define(declaration(_schema))
    _library.impl(_schema.torch_name, _contiguous(REFERENCES[_schema.torch_name]), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{DOMAIN}::{_schema.torch_name}", _fake(_schema), lib=_library)


def overload(schema: OpSchema) -> Any:
    """The callable graph target of an operator."""
    return getattr(getattr(torch.ops, DOMAIN), schema.torch_name).default
