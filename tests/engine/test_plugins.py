"""Our plugin layers in a real TensorRT-RTX engine, and every way a plugin library can be wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

pytest.importorskip("tensorrt_rtx")

import tensorrt_rtx as trt
from dspine_plugins import PluginAbi, build_plugins, find_plugins
from dspine_plugins import abi as plugin_abi

from dspine_export.errors import BuildError, DependencyError
from dspine_export.lowering.engine import EngineReport, backend, build_engines, graph, plugin_library
from dspine_export.lowering.engine.plugin_library import load_plugin_library, missing_creators
from tests.engine.graphs import SPEC, context_graph, operator_graph

NODES = ("injection_0", "transition", "walk")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built library, or one built now; skipped only where the toolchain is missing."""
    try:
        found = find_plugins() or build_plugins(tmp_path_factory.mktemp("plugins"))
    except DependencyError as error:
        pytest.skip(f"the plugins cannot be built here: {error.what}")
    return found.path


def build(folder: Path, library: Path | None, *, dtype: str = "bfloat16", bodies: bool = True) -> EngineReport:
    context_graph(folder / "onnx" / "context.onnx", dtype=dtype)
    operator_graph(folder / "onnx" / "draft.onnx", dtype=dtype, bodies=bodies)
    return build_engines(folder / "onnx", folder, profile=SPEC, plugin_library=library, builder="tensorrt-rtx")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plan_holds_one_layer_for_each_operator(tmp_path: Path, library: Path, dtype: str) -> None:
    context, draft = build(tmp_path, library, dtype=dtype).plans
    assert sorted(draft.network.plugin_layers) == sorted(NODES)
    assert draft.network.layer_types["PLUGIN_V3"] == draft.engine.layer_types["custom_layer"] == 3
    assert [name.split("_myl")[0] for name in sorted(draft.engine.plugin_layers)] == sorted(NODES)
    assert draft.plan_plugins == tuple(sorted(NODES))
    assert context.network.plugin_layers == context.engine.plugin_layers == context.plan_plugins == ()


def test_parser_prefers_a_body_over_the_plugin(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why bodies are stripped, and that a build which lost a plugin layer is refused."""
    monkeypatch.setattr(graph, "strip_operator_bodies", lambda _model: 0)
    with pytest.raises(BuildError, match=r"(?s)one plugin layer for each.*got: 2.*expected: 3"):
        build(tmp_path, library, bodies=True)


def test_tables_reach_the_plan(tmp_path: Path, library: Path) -> None:
    """Marker test: plugins see the very bytes of the weights, none of them folded or converted."""
    context_graph(tmp_path / "onnx" / "context.onnx", dtype="bfloat16")
    contents = operator_graph(tmp_path / "onnx" / "draft.onnx", dtype="bfloat16")
    report = build_engines(tmp_path / "onnx", tmp_path, profile=SPEC, plugin_library=library, builder="tensorrt-rtx")
    plan = report.plan("draft").read_bytes()
    assert [name for name, raw in contents.items() if raw not in plan] == []


def test_library_is_loaded_once(library: Path) -> None:
    load_plugin_library(trt, library, tensorrt_major=11)
    handles = len(plugin_library._handles)
    load_plugin_library(trt, library, tensorrt_major=11)
    assert len(plugin_library._handles) == handles and missing_creators(trt) == []


def test_missing_library(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match="not found") as caught:
        load_plugin_library(trt, tmp_path / "libdspine_trt_plugins.so", tensorrt_major=11)
    assert caught.value.exit_code == 4


def test_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "libdspine_trt_plugins.so").write_text("not ELF")
    with pytest.raises(DependencyError, match="cannot be loaded"):
        load_plugin_library(trt, tmp_path / "libdspine_trt_plugins.so", tensorrt_major=11)


def test_another_library(tmp_path: Path) -> None:
    import _struct  # any extension module that is an ELF file

    other = tmp_path / "libdspine_trt_plugins.so"
    other.write_bytes(Path(_struct.__file__).read_bytes())
    with pytest.raises(DependencyError, match="not a DSpine plugin library"):
        load_plugin_library(trt, other, tensorrt_major=11)


def test_another_abi_major(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / library.name
    copy.write_bytes(library.read_bytes())
    monkeypatch.setattr(plugin_abi.load_abi, "__kwdefaults__", {"require_major": 2})
    with pytest.raises(DependencyError, match=r"(?s)another ABI major.*expected: 2"):
        load_plugin_library(trt, copy, tensorrt_major=11)


def test_headers_of_a_later_tensorrt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = PluginAbi(1, 0, "9.9", (12, 0), ("90",), "")
    monkeypatch.setattr(plugin_abi, "load_abi", lambda _path: later)
    with pytest.raises(DependencyError, match=r"(?s)later TensorRT.*12\.0.*major 11 or earlier"):
        load_plugin_library(trt, tmp_path / "other.so", tensorrt_major=11)


def test_registry_that_refuses(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Registry:
        def get_creator(self, *_: str) -> None:
            return None

        def load_library(self, _path: str) -> None:
            return None

    class Module:
        __name__, __version__ = "tensorrt", "10.14.1"
        get_plugin_registry = Registry

    with pytest.raises(DependencyError, match=r"tensorrt 10\.14\.1 refused the plugin library"):
        load_plugin_library(Module(), library, tensorrt_major=10)  # type: ignore[arg-type]


def test_unregistered_operator_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that no creator serves: the parser's message, the node, and what to do."""
    context_graph(tmp_path / "onnx" / "context.onnx")
    operator_graph(tmp_path / "onnx" / "draft.onnx")
    model = onnx.load(tmp_path / "onnx" / "draft.onnx", load_external_data=False)
    model.graph.node[-1].op_type = "LatticeStroll"
    onnx.save(model, tmp_path / "onnx" / "draft.onnx")
    monkeypatch.setattr("dspine_export.lowering.engine.build._load_plugins", lambda *_: None)
    library = find_plugins()
    if library is None:
        pytest.skip("no plugin library")
    load_plugin_library(backend.open_backend("tensorrt-rtx").module, library.path, tensorrt_major=11)
    with pytest.raises(BuildError, match=r"(?s)'walk' \(LatticeStroll\).*Plugin not found.*--plugin-library"):
        build_engines(tmp_path / "onnx", tmp_path, profile=SPEC, plugin_library=None, builder="tensorrt-rtx")


def test_wheel_without_the_link_would_abort(tmp_path: Path, library: Path) -> None:
    """The defect that discovery repairs, on a copy of the libraries: without the link the process dies at the first plugin."""
    from dspine_export.lowering.engine.discovery import rtx_library_directory

    installed = rtx_library_directory()
    assert installed is not None
    copy = tmp_path / "tensorrt_rtx_libs"
    copy.mkdir()
    (copy / "__init__.py").write_bytes((installed / "__init__.py").read_bytes())
    for shared in installed.glob("*.so.*"):
        (copy / shared.name).hardlink_to(shared)
    context_graph(tmp_path / "onnx" / "context.onnx")
    operator_graph(tmp_path / "onnx" / "draft.onnx")
    code = (
        "import sys; from pathlib import Path; from dspine_export.lowering.engine import build_engines, discovery\n"
        "if sys.argv[3] == 'defect': discovery.repair_rtx_library_link = lambda: False\n"
        "from tests.engine.graphs import SPEC\n"
        "folder = Path(sys.argv[1])\n"
        "build_engines(folder / 'onnx', folder, profile=SPEC, plugin_library=Path(sys.argv[2]), builder='tensorrt-rtx')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    results = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path), str(library), how],
            env=environment,
            capture_output=True,
            text=True,
        )
        for how in ("defect", "repaired")
    ]
    assert results[1].returncode == 0, results[1].stderr
    assert results[0].returncode == -signal.SIGABRT
