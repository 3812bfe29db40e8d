"""What is changed in a graph before a TensorRT parser reads it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from dspine_export.errors import BuildError
from dspine_export.lowering.engine.graph import load_graph, mark_decomposable_attention, strip_operator_bodies
from tests.engine.graphs import SPEC, draft_graph, operator_graph


def test_operator_bodies_are_removed_and_others_kept(tmp_path: Path) -> None:
    operator_graph(tmp_path / "draft.onnx", bodies=True)
    model = onnx.load(tmp_path / "draft.onnx", load_external_data=False)
    other = model.functions.add()
    other.CopyFrom(model.functions[0])
    other.domain = "another"
    assert strip_operator_bodies(model) == 1
    assert [function.domain for function in model.functions] == ["another"]
    assert strip_operator_bodies(model) == 0


@pytest.mark.parametrize(("dtype", "changed"), [("float32", 1), ("bfloat16", 0)])
def test_only_float32_attention_is_marked(tmp_path: Path, dtype: str, changed: int) -> None:
    draft_graph(tmp_path / "draft.onnx", dtype=dtype)
    model = onnx.load(tmp_path / "draft.onnx", load_external_data=False)
    assert mark_decomposable_attention(model) == changed
    assert mark_decomposable_attention(model) == 0


def test_loaded_graph_lists_the_operators(tmp_path: Path) -> None:
    operator_graph(tmp_path / "draft.onnx", bodies=True)
    graph = load_graph(tmp_path / "draft.onnx", SPEC)
    assert graph.plugin_nodes == (
        ("AdjacentInjection", "injection_0"),
        ("TransitionScores", "transition"),
        ("LatticeWalk", "walk"),
    )
    assert not onnx.ModelProto.FromString(graph.proto).functions
    assert len(graph.weights) == 7


@pytest.mark.parametrize("content", [b"", b"not a protobuf at all", b"\xff" * 64])
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "draft.onnx").write_bytes(content)
    with pytest.raises(BuildError, match=r"draft\.onnx"):
        load_graph(tmp_path / "draft.onnx", SPEC)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="missing"):
        load_graph(tmp_path / "draft.onnx", SPEC)
