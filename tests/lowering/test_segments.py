"""A fused graph cut at our operators computes what it computed whole."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.errors import BuildError
from dspine_export.lowering.onnx_export import WEIGHTS_FILE, export_onnx
from dspine_export.lowering.onnx_session import OnnxSession
from dspine_export.lowering.segments import OperatorCall, Segment, cut
from dspine_export.ops_schema import OPS
from dspine_export.passes.torch_ops import overload

GOLDEN = Path(__file__).parents[1] / "golden"
CASE, LAYERS = "b8_gqa", 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fused")
    export_onnx(
        open_checkpoint(GOLDEN / CASE / "drafter"), None, out, dtype="float32", form="fused", entries=("draft",)
    )
    return out


def feeds() -> dict[str, Tensor]:
    io, generator = load_file(GOLDEN / CASE / "io.safetensors"), torch.Generator().manual_seed(0)
    shape = (2, LAYERS, 2, 9, 16)
    return {
        "anchor_ids": io["anchor_ids"][:2],
        "context_lengths": torch.tensor([9, 4]),
        "keys": torch.randn(shape, generator=generator),
        "values": torch.randn(shape, generator=generator),
        "temperature": torch.tensor([0.0, 0.7]),
        "uniforms": torch.rand(2, 7, generator=generator),
        "embed_tokens": io["embed_tokens.weight"],
        "lm_head": io["lm_head.weight"],
    }


def initialisers(folder: Path, model: onnx.ModelProto) -> dict[str, Tensor]:
    stored = load_file(folder / WEIGHTS_FILE)
    small = {
        tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())
        for tensor in model.graph.initializer
        if not tensor.external_data
    }
    return stored | small


def test_segments_and_operators_equal_the_whole_graph(folder: Path) -> None:
    model = onnx.load(folder / "draft.onnx", load_external_data=False)
    steps = cut(model)
    kinds = [type(step).__name__ if isinstance(step, Segment) else step.op_type for step in steps]
    assert kinds == ["Segment", "AdjacentInjection"] * LAYERS + ["Segment", "TransitionScores", "LatticeWalk"]
    values = initialisers(folder, model) | feeds()
    operators = {schema.op_type: schema for schema in OPS}
    for index, step in enumerate(steps):
        if isinstance(step, OperatorCall):
            operands = [values[name] for name in step.inputs]
            result = overload(operators[step.op_type])(*operands, *step.attributes.values())
            values |= dict(zip(step.outputs, result if isinstance(result, tuple) else (result,), strict=True))
            continue
        path = folder / f"segment{index}.onnx"
        onnx.save(step.model, path)
        onnx.checker.check_model(str(path))
        got = OnnxSession(path).run({name: values[name] for name in step.inputs})
        assert tuple(got) == step.outputs
        values |= got
    whole = OnnxSession(folder / "draft.onnx").run(feeds())
    for name in ("tokens", "candidate_ids", "unrefined_tokens"):
        assert torch.equal(values[name], whole[name]), name
    torch.testing.assert_close(values["transition_scores"], whole["transition_scores"])
    torch.testing.assert_close(values["q"], whole["q"])


def test_nothing_large_crosses_a_cut(folder: Path) -> None:
    """A layer's keys are taken from the input in the layer's own segment; only hidden states and small tables are handed on."""
    segments = [
        step for step in cut(onnx.load(folder / "draft.onnx", load_external_data=False)) if isinstance(step, Segment)
    ]
    for segment in segments[:LAYERS]:
        assert {"keys", "values"} <= set(segment.inputs)
    handed_on = {name for segment in segments for name in segment.outputs}
    carried = [name for segment in segments for name in segment.inputs if name in handed_on]
    assert len(set(carried)) <= 6, carried


def test_an_untyped_value_at_a_cut_is_named(folder: Path) -> None:
    model = onnx.load(folder / "draft.onnx", load_external_data=False)
    del model.graph.value_info[:]
    with pytest.raises(BuildError, match="no known type"):
        cut(model)
