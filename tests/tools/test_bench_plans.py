"""The benchmarks of plans without a GPU: plans built beforehand and found again, carried graphs, measured plans in the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest
from safetensors.torch import load_file

from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.lowering.onnx_export import WEIGHTS_FILE
from dspine_export.lowering.segments import OperatorCall
from dspine_export.runtime.bench.table import row_line
from tools.bench_draft import add_plans, plan_lines
from tools.segment_plans import Plan, build_plans, provide_graph

GOLDEN = Path(__file__).parents[1] / "golden" / "b4_mha_k1"
SIZES = {"batch": 2, "context": 16}


@pytest.mark.skipif(sys.platform != "linux", reason="TensorRT-RTX is built for Linux here")
def test_plans_built_before_are_found_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    from dspine_export.lowering.engine.backend import open_backend

    backend, checkpoint = open_backend("tensorrt-rtx"), open_checkpoint(GOLDEN / "drafter")
    where = tmp_path / "fused"
    provide_graph(checkpoint, "fused", "float32", where, None)
    parts = build_plans(backend, where, "fused", SIZES)
    layers = checkpoint.config.num_layers
    operators = [part.op_type for part in parts if isinstance(part, OperatorCall)]
    assert operators == ["AdjacentInjection"] * layers + ["TransitionScores", "LatticeWalk"]
    plans = [part for part in parts if isinstance(part, Plan)]
    assert len(plans) == layers + 1 and all(plan.path.stat().st_size and plan.seconds > 0 for plan in plans)
    assert not list(where.glob("*unfinished*"))
    before = [plan.path.stat().st_mtime_ns for plan in plans]
    again = [part for part in build_plans(backend, where, "fused", SIZES) if isinstance(part, Plan)]
    assert again == plans and [plan.path.stat().st_mtime_ns for plan in again] == before


def test_a_carried_graph_reads_the_weights_written_here(tmp_path: Path) -> None:
    """The graph comes alone, and with places of another file: names, not offsets, tie it to the checkpoint."""
    checkpoint = open_checkpoint(GOLDEN / "drafter")
    first, carried, second = tmp_path / "first", tmp_path / "carried" / "portable", tmp_path / "second"
    provide_graph(checkpoint, "portable", "float32", first, None)
    model = onnx.load(first / "draft.onnx", load_external_data=False)
    outside = [tensor for tensor in model.graph.initializer if tensor.external_data]
    for tensor in outside:
        for entry in tensor.external_data:
            entry.value = {"offset": "7", "location": "elsewhere"}.get(entry.key, entry.value)
    carried.mkdir(parents=True)
    onnx.save(model, carried / "draft.onnx")
    provide_graph(checkpoint, "portable", "float32", second, carried.parent)
    stored, found = load_file(first / WEIGHTS_FILE), onnx.load(second / "draft.onnx")
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in found.graph.initializer}
    assert outside and all((values[t.name] == stored[t.name].numpy()).all() for t in outside)


def test_measured_plans_join_the_table() -> None:
    rows = [{"kind": kind, "batch": 1, "context": 8, "skipped": {}} for kind in ("DFlash", "DSpine")]
    rows = [row | {"floor": {"total": 2.0}, "ours": 4.0} for row in rows]
    counts = {"tokens": 15, "equal_to_eager": 14, "equal_to_kernels": 15}
    case = {"batch": 1, "context": 8, "portable": {"graph_us": 30.0, "stream_us": 40.0, **counts}}
    case["segments"] = {"graph_us": None, "stream_us": 25.0, **counts}
    add_plans(rows, {"label": "a library", "cases": [case, case | {"batch": 2}]})
    assert "engine" not in rows[0] and rows[1]["engine"]["name"] == "a library"
    failed = [{"kind": "DSpine", "batch": 1, "context": 1024, "skipped": {"naive_graph": "too large"}}]
    add_plans(failed, {"label": "a library", "cases": [{"batch": 1, "context": 1024, "failed": "out of memory"}]})
    assert failed[0]["skipped"] == {"naive_graph": "too large", "engine": "out of memory"} and "segments" not in failed[0]
    assert row_line(rows[1]).split()[8] == "30"
    (line,) = plan_lines(json.loads(json.dumps(rows)))
    assert "segments and plugins 25 us uncaptured, 14 of 15" in line and "portable plan 30 us, 14" in line
