"""`fold_transfer_tables`: projections of known tokens become rows of one table."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from dspine_export.passes.cleanup import drop_training_only
from dspine_export.passes.fold_tables import CODES, MESSAGE, PREDECESSOR_GATE, TOKEN_TABLE, fold_transfer_tables
from dspine_export.passes.program import Program, emit, from_traced
from tests.programs import DSPINE, assert_drafts_like_eager, count, drafter_of, fingerprint, traced

aten = torch.ops.aten


def cleaned(name: str = "plain") -> Program:
    return drop_training_only(from_traced(traced(name)["draft"]))


def known_projections(program: Program) -> list[fx.Node]:
    """linear(sqrt(r) * codes[ids], W)"""
    codes = program.weight_node(CODES)
    found = []
    for gather in codes.users if codes is not None else ():
        for feature in gather.users:
            found += [user for user in feature.users if user.target == aten.linear.default]
    return found


@pytest.mark.parametrize("name", DSPINE)
def test_hit(name: str) -> None:
    before = cleaned(name)
    assert len(known_projections(before)) == 2 * before.config.num_layers + 2  # the anchor per layer, the candidates
    after = fold_transfer_tables(before)
    assert after.weight_node(CODES) is None and CODES not in after.weights.values()
    table = after.weight_node(TOKEN_TABLE)
    assert table is not None and before.config.transfer is not None
    assert tuple(table.meta["val"].shape) == (before.config.vocab_size, 2 * before.config.transfer.message_size)
    assert len(table.users) == 2  # one gather for the anchor, one for the candidates
    # Both halves of the anchor's row are wanted together, so no layer cuts the row and joins it again.
    anchor_row = next(user for user in table.users if user.meta["val"].ndim == 2)
    assert all(
        user.target != aten.cat.default
        for half in anchor_row.users
        for user in half.users
        if half.target == aten.slice.Tensor
    )


def break_scale(program: Program, node: fx.Node) -> None:
    feature = node.args[0]
    assert isinstance(feature, fx.Node)
    feature.update_arg(1, 2.0)


def break_linearity(program: Program, node: fx.Node) -> None:
    with program.graph.inserting_before(node):
        node.update_arg(0, emit(program.graph, aten.tanh.default, node.args[0]))


def break_weight(program: Program, node: fx.Node) -> None:
    """Another weight of the same shape."""
    node.update_arg(1, program.weight_node("injection.receiver_gate.weight"))


def break_table(program: Program, node: fx.Node) -> None:
    gather = node.args[0].args[0]  # type: ignore[union-attr]
    assert isinstance(gather, fx.Node)
    with program.graph.inserting_before(gather):
        gather.update_arg(0, emit(program.graph, aten.neg.default, gather.args[0]))


@pytest.mark.parametrize("damage", [break_scale, break_linearity, break_weight, break_table])
def test_near_miss(damage: Callable[[Program, fx.Node], None]) -> None:
    """A projection that is not quite ours keeps the codes in the graph, and everything keeps its value."""
    program = cleaned()
    damage(program, known_projections(program)[-1])
    after = fold_transfer_tables(program)
    assert after.weight_node(CODES) is not None
    assert count(after, aten.linear.default) > count(fold_transfer_tables(cleaned()), aten.linear.default)
    same_values(program, after)


def test_swapped_halves_are_not_joined() -> None:
    program = cleaned()
    joined = next(n for n in program.graph.nodes if n.target == aten.cat.default and _is_anchor_pair(program, n))
    joined.update_arg(0, list(reversed(joined.args[0])))
    after = fold_transfer_tables(program)
    clean = fold_transfer_tables(cleaned())
    assert count(after, aten.cat.default) == count(clean, aten.cat.default) + 1
    same_values(program, after)


def _is_anchor_pair(program: Program, node: fx.Node) -> bool:
    weights = [program.weight_node(name) for name in (MESSAGE, PREDECESSOR_GATE)]
    return [part.args[1] for part in node.args[0] if part.target == aten.linear.default] == weights


def same_values(before: Program, after: Program) -> None:
    from tests.programs import draft_case, weights_of

    drafter = drafter_of("plain")
    inputs, _ = draft_case(drafter, [2, 0, 4], 6)
    with torch.no_grad():
        want, got = before.run(weights_of(drafter), inputs), after.run(weights_of(drafter), inputs)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-4)


def test_dflash_and_context_are_left_alone() -> None:
    for program in (cleaned("dflash_causal"), drop_training_only(from_traced(traced("plain")["context"]))):
        assert fingerprint(fold_transfer_tables(program)) == fingerprint(program)


def test_idempotent_and_pure() -> None:
    program = cleaned()
    before = fingerprint(program)
    once = fold_transfer_tables(program)
    assert fingerprint(program) == before
    assert fingerprint(fold_transfer_tables(once)) == fingerprint(once)


@pytest.mark.parametrize("name", ["plain", "smallest", "one_candidate"])
def test_numeric(name: str) -> None:
    assert_drafts_like_eager(fold_transfer_tables(cleaned(name)), drafter_of(name), [3, 0], 5)
