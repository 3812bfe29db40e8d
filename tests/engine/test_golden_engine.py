"""A golden drafter through the whole line: checkpoint, fused ONNX, TensorRT-RTX engine with our plugin layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx")

from dspine_plugins import build_plugins, find_plugins

from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.errors import DependencyError
from dspine_export.lowering.engine import EngineReport, build_engines
from dspine_export.lowering.engine.graph import ENTRIES, load_graph
from dspine_export.lowering.onnx_export import export_onnx
from tests.engine.graphs import SPEC

DRAFTER = Path(__file__).parents[1] / "golden" / "b8_gqa" / "drafter"
LAYERS, WIDTH = 3, 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineReport:
    folder = tmp_path_factory.mktemp("golden")
    try:
        library = (find_plugins() or build_plugins(folder / "plugins")).path
    except DependencyError as error:
        pytest.skip(f"the plugins cannot be built here: {error.what}")
    export_onnx(open_checkpoint(DRAFTER), None, folder / "onnx", dtype="bfloat16", form="fused")
    return build_engines(folder / "onnx", folder, profile=SPEC, plugin_library=library, builder="tensorrt-rtx")


def test_engine_holds_our_plugin_layers(engine: EngineReport) -> None:
    context, draft = engine.plans
    assert draft.network.layer_types["PLUGIN_V3"] == draft.engine.layer_types["custom_layer"] == LAYERS + 2
    assert len(draft.plan_plugins) == LAYERS + 2 and not context.plan_plugins
    assert [tensor.name for tensor in draft.network.outputs] == [
        "tokens",
        "candidate_ids",
        "transition_scores",
        "q",
        "unrefined_tokens",
    ]


def test_every_checkpoint_tensor_is_in_its_plan(engine: EngineReport) -> None:
    """Marker test: each tensor's bytes as stored, or each of its columns where the builder fused projections side by side."""
    lost = []
    for entry in ENTRIES:
        graph = load_graph(engine.folder.parents[1] / "onnx" / f"{entry}.onnx", SPEC)
        plan = engine.plan(entry).read_bytes()
        for weight in graph.weights:
            raw = weight.path.read_bytes()[weight.offset_bytes :][: weight.size_bytes]
            if raw not in plan and not all(column in plan for column in columns(raw, weight.name)):
                lost.append(f"{entry}: {weight.name}")
    assert lost == []


def columns(raw: bytes, name: str) -> list[bytes]:
    """The columns of a bfloat16 matrix with our input width: what a row of its transpose looks like."""
    assert name.endswith("_proj.weight"), f"{name} is neither whole nor transposed in the plan"
    return [column.tobytes() for column in np.frombuffer(raw, np.uint16).reshape(-1, WIDTH).T.copy()]
