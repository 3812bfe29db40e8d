"""Fusion finds every occurrence of an operator's reference, and nothing that merely resembles it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import fx

from dspine_export.ops_schema import ADJACENT_INJECTION, LATTICE_WALK, TRANSITION_SCORES
from dspine_export.passes.cleanup import drop_training_only
from dspine_export.passes.fold_tables import fold_transfer_tables
from dspine_export.passes.fuse import fuse_adjacent_injection, fuse_transition
from dspine_export.passes.program import Program, emit, from_traced
from dspine_export.passes.torch_ops import overload
from tests.programs import DSPINE, assert_drafts_like_eager, count, drafter_of, fingerprint, traced

aten = torch.ops.aten
INJECTION, SCORES, WALK = (overload(schema) for schema in (ADJACENT_INJECTION, TRANSITION_SCORES, LATTICE_WALK))


@functools.cache
def _folded(name: str) -> Program:
    return fold_transfer_tables(drop_training_only(from_traced(traced(name)["draft"])))


def folded(name: str = "plain") -> Program:
    return _folded(name).copy()


def counts(program: Program) -> tuple[int, int, int]:
    return count(program, INJECTION), count(program, SCORES), count(program, WALK)


@pytest.mark.parametrize("name", DSPINE)
def test_hit(name: str) -> None:
    """L injections, one transition, one walk: L + 2 operators."""
    program = folded(name)
    layers = program.config.num_layers
    injected = fuse_adjacent_injection(program)
    assert counts(injected) == (layers, 0, 0)
    after = fuse_transition(injected)
    assert counts(after) == (layers, 1, 1)
    assert count(after, aten.sigmoid.default) == 0 and count(after, aten.argmax.default) == 0
    scores = next(node for node in after.graph.nodes if node.target == SCORES)
    assert scores.args[-1] == program.config.rms_norm_eps


def gates(program: Program) -> list[fx.Node]:
    """The sigmoid of every injection, then the one of the transition."""
    return [node for node in program.graph.nodes if node.target == aten.sigmoid.default]


def extra_user(program: Program) -> None:
    """A value inside the pattern that something else needs cannot disappear."""
    gate = gates(program)[0]
    with program.graph.inserting_after(gate):
        probe = emit(program.graph, aten.neg.default, gate)
    output = program.graph.output_node()
    output.args = ((*output.args[0], probe),)  # type: ignore[misc]


def changed_literal(program: Program) -> None:
    """|h| / sqrt(d) with another divisor."""
    root = next(node for node in program.graph.nodes if node.target == aten.sqrt.default and _feeds_write(node))
    divided = next(iter(root.users))
    assert divided.target == aten.div.Tensor
    divided.update_arg(1, float(divided.args[1]) * 2)  # type: ignore[arg-type]


def _feeds_write(node: fx.Node) -> bool:
    return any(user.target == aten.div.Tensor and isinstance(user.args[1], float) for user in node.users)


def other_function(program: Program) -> None:
    gates(program)[0].target = aten.tanh.default


def wrong_slice(program: Program) -> None:
    """Predecessors 0 .. B-3 in place of 1 .. B-2."""
    found = [n for n in program.graph.nodes if n.target == aten.slice.Tensor and n.args[1:] == (1, 1, -1)]
    node = found[0]
    node.args = (node.args[0], 1, 0, -2)


@pytest.mark.parametrize("damage", [extra_user, changed_literal, other_function, wrong_slice])
def test_injection_near_miss(damage: Callable[[Program], None]) -> None:
    """The damaged layer stays as it is, the others are fused."""
    program = folded()
    damage(program)
    after = fuse_adjacent_injection(program)
    assert counts(after)[0] == program.config.num_layers - 1
    after.graph.lint()


def other_eps(program: Program) -> None:
    norm = [node for node in program.graph.nodes if node.target == aten.rms_norm.default][-1]
    norm.update_arg(3, 1e-5)


def other_gate(program: Program) -> None:
    gates(program)[-1].target = aten.tanh.default


def scores_scaled(program: Program) -> None:
    """Something between the refined state and the head."""
    product = next(node for node in reversed(program.graph.nodes) if node.target == aten.matmul.default)
    with program.graph.inserting_before(product):
        product.update_arg(0, emit(program.graph, aten.mul.Tensor, product.args[0], 2.0))


@pytest.mark.parametrize("damage", [other_eps, other_gate, scores_scaled])
def test_transition_near_miss(damage: Callable[[Program], None]) -> None:
    program = fuse_adjacent_injection(folded())
    damage(program)
    after = fuse_transition(program)
    assert counts(after)[1:] == (0, 1)
    after.graph.lint()


def clamp_bound(program: Program) -> None:
    node = next(node for node in program.graph.nodes if node.target == aten.clamp_max.default)
    node.update_arg(1, 1)


def keep_soft_rows(program: Program) -> None:
    """A row of q that leaves the graph by another way as well."""
    soft = next(node for node in program.graph.nodes if node.target == aten.softmax.int)
    output = program.graph.output_node()
    output.args = ((*output.args[0], soft),)  # type: ignore[misc]


@pytest.mark.parametrize("damage", [clamp_bound, keep_soft_rows])
def test_walk_near_miss(damage: Callable[[Program], None]) -> None:
    program = fuse_adjacent_injection(folded())
    damage(program)
    after = fuse_transition(program)
    assert counts(after)[1:] == (1, 0)
    after.graph.lint()


def test_dflash_has_nothing_to_fuse() -> None:
    program = drop_training_only(from_traced(traced("dflash_causal")["draft"]))
    after = fuse_transition(fuse_adjacent_injection(program))
    assert fingerprint(after) == fingerprint(program)


def test_idempotent_and_pure() -> None:
    program = folded()
    before = fingerprint(program)
    injected = fuse_adjacent_injection(program)
    assert fingerprint(program) == before
    assert fingerprint(fuse_adjacent_injection(injected)) == fingerprint(injected)
    walked = fuse_transition(injected)
    assert counts(injected)[1:] == (0, 0)
    assert fingerprint(fuse_transition(walked)) == fingerprint(walked)


@pytest.mark.parametrize("name", DSPINE)
def test_numeric(name: str) -> None:
    injected = fuse_adjacent_injection(folded(name))
    assert_drafts_like_eager(injected, drafter_of(name), [3, 0], 5)
    assert_drafts_like_eager(fuse_transition(injected), drafter_of(name), [3, 0], 5)
