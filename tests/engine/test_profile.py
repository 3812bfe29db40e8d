"""Profiles are decided before the builder sees them."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h

from dspine_export.errors import BuildError, UsageError
from dspine_export.lowering.engine.profile import ProfileSpec, Range, evaluate_dimension, input_profiles
from tests.engine.graphs import SPEC, draft_graph, value


def model_with(shape: list[int | str]) -> onnx.ModelProto:
    x, y = value("mask", T.FLOAT, shape), value("out", T.FLOAT, shape)
    return h.make_model(h.make_graph([h.make_node("Identity", ["mask"], ["out"])], "g", [x], [y]))


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        (ProfileSpec(batch=Range(4, 2, 8)), "batch"),
        (ProfileSpec(context=Range(1, 512, 256), tokens=Range(1, 1, 1)), "context"),
        (ProfileSpec(batch=Range(0, 1, 1)), "batch.min"),
        (ProfileSpec(context=Range(1, 1, 2**31)), "context.max"),
        (ProfileSpec(context=Range(1, 8, 16), tokens=Range(1, 8, 32)), "tokens.max"),
        (ProfileSpec(batch=Range(1, True, 2)), "batch.opt"),
    ],
)
def test_users_mistakes_are_named(spec: ProfileSpec, where: str) -> None:
    with pytest.raises(UsageError, match=where):
        spec.check()


def test_shapes_follow_the_symbols(tmp_path: Path) -> None:
    draft_graph(tmp_path / "draft.onnx")
    profiles = {item.name: item for item in input_profiles(onnx.load(tmp_path / "draft.onnx"), SPEC)}
    assert (profiles["keys"].min, profiles["keys"].opt, profiles["keys"].max) == (
        (1, 2, 1, 16),
        (2, 2, 64, 16),
        (4, 2, 256, 16),
    )
    assert profiles["keys"].dynamic


def test_derived_dimension_is_computed_from_its_symbol() -> None:
    (mask,) = input_profiles(model_with(["batch", 1, "context + 16"]), SPEC)
    assert (mask.min, mask.opt, mask.max) == ((1, 1, 17), (2, 1, 80), (4, 1, 272))


@pytest.mark.parametrize(
    "dimension", ["sequence", "", "context + sequence", "context ** 2", "__import__('os')", "context // 0"]
)
def test_undetermined_dimension_is_refused(dimension: str) -> None:
    with pytest.raises(BuildError, match="mask"):
        input_profiles(model_with(["batch", dimension]), SPEC)


@pytest.mark.parametrize("dimension", ["300 - context", "context - 1"])
def test_dimension_without_a_valid_range_is_refused(dimension: str) -> None:
    with pytest.raises(BuildError, match="no valid range"):
        input_profiles(model_with(["batch", dimension]), SPEC)


def test_expressions() -> None:
    assert evaluate_dimension("2*(context + 16)//3", {"context": 14}) == 20
