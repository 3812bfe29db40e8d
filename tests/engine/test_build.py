"""Real TensorRT-RTX builds on whatever machine this is; no GPU is needed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx")

from dspine_export.errors import BuildError, DependencyError, OutputError, UsageError
from dspine_export.lowering.engine import EngineReport, ProfileSpec, Range, build_engines, memory
from dspine_export.lowering.engine.callbacks import PlanSink
from tests.engine import graphs
from tests.engine.graphs import SPEC, context_graph, draft_graph, operator_graph

ROOT = Path(__file__).parents[2]


def write_graphs(folder: Path, dtype: str = "float32") -> dict[str, dict[str, bytes]]:
    """Both graphs, their weights beside the folder as in a bundle."""
    return {
        "context": context_graph(folder / "onnx" / "context.onnx", dtype=dtype, data=Path("../drafter/context.bin")),
        "draft": draft_graph(folder / "onnx" / "draft.onnx", dtype=dtype, data=Path("../drafter/draft.bin")),
    }


def build(folder: Path, **options: object) -> EngineReport:
    arguments = {"profile": SPEC, "plugin_library": None, "builder": "tensorrt-rtx"} | options
    return build_engines(folder / "onnx", folder, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_is_in_the_plan(tmp_path: Path, dtype: str) -> None:
    """Marker test: each tensor's unique bytes are found in its own plan and not in the other."""
    contents = write_graphs(tmp_path, dtype)
    report = build(tmp_path)
    for entry, weights in contents.items():
        plan = report.plan(entry).read_bytes()
        other = report.plan("draft" if entry == "context" else "context").read_bytes()
        for name, raw in weights.items():
            assert raw in plan, f"{entry}: {name}"
            assert raw not in other, f"{name} of {entry} is in the other plan"


@pytest.mark.parametrize("size", [8, 257])
def test_head_size_without_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], size: int
) -> None:
    """The builder itself would print an internal error; float32 takes any size."""
    monkeypatch.setattr(graphs, "HEAD_DIM", size)
    write_graphs(tmp_path, "bfloat16")
    with pytest.raises(BuildError, match=f"head_dim {size}") as raised:
        build(tmp_path)
    assert "9 to 256" in str(raised.value)
    assert "--dtype float32" in str(raised.value)
    assert "Internal Error" not in "".join(capfd.readouterr())
    write_graphs(tmp_path, "float32")
    assert build(tmp_path).folder.is_dir()


def test_report_and_layout(tmp_path: Path) -> None:
    write_graphs(tmp_path)
    messages: list[str] = []
    report = build(tmp_path, progress=messages.append)
    assert report.folder == tmp_path / "engines" / f"tensorrt-rtx-{report.version}-sm80plus"
    assert sorted(path.name for path in report.folder.iterdir()) == ["build.json", "context.plan", "draft.plan"]
    stored = json.loads((report.folder / "build.json").read_text())
    assert stored == json.loads(json.dumps(report.to_json()))
    for plan in report.plans:
        data = report.plan(plan.entry).read_bytes()
        assert (plan.size_bytes, plan.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert plan.seconds > 0 and plan.peak_rss_bytes > plan.size_bytes
        assert plan.engine.layer_types.get("kgen", 0) > 0 and plan.engine.plugin_layers == ()
    assert stored["compute_capabilities"] == ["8.0+"]
    assert stored["plans"][1]["network"]["inputs"][1] == {"name": "keys", "dtype": "float", "shape": [-1, 2, -1, 16]}
    assert "context: parsing context.onnx" in messages and any(
        "building with TensorRT-RTX" in text for text in messages
    )


def test_named_capability_goes_to_its_own_folder(tmp_path: Path) -> None:
    write_graphs(tmp_path, "bfloat16")
    first, second = build(tmp_path), build(tmp_path, compute_capability="8.9")
    assert second.folder.name.endswith("-sm89") and first.folder.is_dir() and first.folder != second.folder


def test_rebuilding_replaces_the_folder(tmp_path: Path) -> None:
    write_graphs(tmp_path)
    folder = build(tmp_path).folder
    (folder / "stale").touch()
    build(tmp_path)
    assert not (folder / "stale").exists()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"profile": ProfileSpec(batch=Range(2, 1, 4))}, UsageError, "not ordered"),
        ({"builder": "trt"}, UsageError, "unknown engine builder"),
        ({"compute_capability": "9.0"}, DependencyError, "does not support compute capability 9.0"),
    ],
)
def test_mistakes_leave_nothing_behind(tmp_path: Path, options: dict[str, object], error: type, says: str) -> None:
    write_graphs(tmp_path)
    with pytest.raises(error, match=says):
        build(tmp_path, **options)
    assert not (tmp_path / "engines").exists()


def test_truncated_weights(tmp_path: Path) -> None:
    write_graphs(tmp_path)
    data = tmp_path / "drafter" / "draft.bin"
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(BuildError, match="truncated"):
        build(tmp_path)
    assert not (tmp_path / "engines").exists()


def test_memory_preflight_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_graphs(tmp_path)
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 100_000_000)
    with pytest.raises(DependencyError, match="not enough memory"):
        build(tmp_path)
    assert not (tmp_path / "engines").exists()


def test_operators_without_a_plugin_library(tmp_path: Path) -> None:
    write_graphs(tmp_path)
    operator_graph(tmp_path / "onnx" / "draft.onnx")
    with pytest.raises(DependencyError, match="no plugin library was given"):
        build(tmp_path)


def test_parser_error_names_the_node(tmp_path: Path) -> None:
    import onnx

    write_graphs(tmp_path)
    path = tmp_path / "onnx" / "context.onnx"
    model = onnx.load(path, load_external_data=False)
    model.graph.node[1].op_type = "NoSuchOperator"
    onnx.save(model, path)
    with pytest.raises(BuildError, match=r"(?s)could not parse context\.onnx.*'norm_node' \(NoSuchOperator\)"):
        build(tmp_path)
    assert not list((tmp_path / "engines").iterdir())


def test_builder_failure_carries_its_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dspine_export.lowering.engine import graph

    write_graphs(tmp_path)
    monkeypatch.setattr(graph, "mark_decomposable_attention", lambda _model: 0)
    with pytest.raises(BuildError, match=r"(?s)could not build the engine.*[Aa]ttention"):
        build(tmp_path)
    assert not list((tmp_path / "engines").iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_exceptions_inside_callbacks_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The builder swallows what a callback raises and reports success: Ctrl-C and a full disk must come out all the same."""
    write_graphs(tmp_path)

    def fail(_sink: PlanSink, _chunk: object) -> int:
        raise error

    monkeypatch.setattr(PlanSink, "write", fail)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OutputError):
        build(tmp_path)
    assert not list((tmp_path / "engines").iterdir())
    monkeypatch.undo()
    assert build(tmp_path).folder.is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill -9"])
def test_interrupted_build_can_be_repeated(tmp_path: Path, number: signal.Signals) -> None:
    write_graphs(tmp_path)
    code = """
        import sys, time
        from pathlib import Path
        from dspine_export.lowering.engine import build_engines
        from tests.engine.graphs import SPEC
        folder = Path(sys.argv[1])
        def progress(text):
            if "building" in text:
                print("started", flush=True)
                time.sleep(60)
        build_engines(folder / "onnx", folder, profile=SPEC, plugin_library=None, builder="tensorrt-rtx", progress=progress)
        """
    import textwrap

    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "started\n"
        child.send_signal(number)
        child.wait(120)
    leftovers = list((tmp_path / "engines").iterdir())
    assert all(path.name.startswith(".") for path in leftovers)
    assert number == signal.SIGKILL or not leftovers
    report = build(tmp_path)
    assert list((tmp_path / "engines").iterdir()) == [report.folder]


def test_signal_during_the_c_plus_plus_part_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that runs inside a logger callback: the exception must survive the C++ frames above it."""
    from dspine_export.lowering.engine import callbacks

    write_graphs(tmp_path)
    original, fired = callbacks.Interruption.run, []

    def run(self: callbacks.Interruption, action, default):  # type: ignore[no-untyped-def]
        if not fired:
            fired.append(time.monotonic())

            def action() -> None:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)

        return original(self, action, default)

    monkeypatch.setattr(callbacks.Interruption, "run", run)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path)
    assert fired
