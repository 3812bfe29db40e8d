"""The rows of the loading matrix that need a parser or a built plan, one process each; see test_plugin_loading for the table.

What a deserialising runtime does with a carried library (``engine_host_code_allowed``) needs a GPU and is not covered.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from dspine_plugins import PluginLibrary

from tests.plugins.processes import HERE, run_python

PREAMBLE = """
import ctypes, sys
import tensorrt_rtx as trt
logger = trt.Logger(trt.Logger.ERROR)
def parse():
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    ok = parser.parse(open(sys.argv[2], "rb").read())
    return "parsed" if ok else parser.get_error(0).desc()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    script = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    made = run_python(script, HERE / "onnx_models.py", folder)
    assert made.returncode == 0, made.stderr
    return folder / "AdjacentInjection.float32.onnx"


@pytest.mark.parametrize(
    ("load", "outcome"),
    [
        pytest.param("trt.get_plugin_registry().load_library(sys.argv[1])", "parsed", id="registry.load_library"),
        pytest.param("ctypes.CDLL(sys.argv[1])", "Plugin not found", id="plain dlopen"),
        pytest.param("pass", "Plugin not found", id="not at all"),
    ],
)
def test_parsing_after(
    plugins: PluginLibrary, model: Path, rtx_environment: dict[str, str], load: str, outcome: str
) -> None:
    result = run_python(f"{PREAMBLE}\n{load}\nprint(parse())", plugins.path, model, environment=rtx_environment)
    assert result.returncode == 0, result.stderr
    assert outcome in result.stdout


BUILD = """
import sys
from pathlib import Path
from tests.engine.graphs import SPEC, context_graph, operator_graph
from dspine_export.lowering.engine import build_engines
folder = Path(sys.argv[2])
context_graph(folder / "onnx" / "context.onnx", dtype="float32")
operator_graph(folder / "onnx" / "draft.onnx", dtype="float32")
sizes = []
for carry in (False, True):
    out = folder / str(carry)
    options = dict(profile=SPEC, plugin_library=Path(sys.argv[1]), builder="tensorrt-rtx", carry_plugins=carry)
    report = build_engines(folder / "onnx", out, **options)
    sizes += [plan.size_bytes for plan in report.plans]
print(*sizes)
"""


def test_build_option_puts_the_library_into_the_plan_that_needs_it(
    plugins: PluginLibrary, rtx_environment: dict[str, str], tmp_path: Path
) -> None:
    """``plugins_to_serialize`` of a recipe, down to the plan: the draft plan grows by about the library, the context plan does not."""
    environment = {**rtx_environment, "PYTHONPATH": str(HERE.parents[1])}
    result = run_python(BUILD, plugins.path, tmp_path, environment=environment)
    assert result.returncode == 0, result.stderr
    context, draft, context_carrying, draft_carrying = map(int, result.stdout.split()[-4:])
    assert draft_carrying - draft > plugins.path.stat().st_size // 8
    assert abs(context_carrying - context) < 4096


def test_product_refuses_the_shim_in_place_of_the_library(
    plugins: PluginLibrary, rtx_environment: dict[str, str]
) -> None:
    """Loaded through the registry, a library without creators fails without a reason; ours is given before."""
    script = """
import sys
from pathlib import Path
import tensorrt_rtx as trt
from dspine_export.errors import DependencyError
from dspine_export.lowering.engine.plugin_library import load_plugin_library
try:
    load_plugin_library(trt, Path(sys.argv[1]), tensorrt_major=11)
except DependencyError as error:
    print(error)
"""
    environment = {**rtx_environment, "PYTHONPATH": str(HERE.parents[1])}
    result = run_python(script, plugins.autoreg, environment=environment)
    assert result.returncode == 0, result.stderr
    assert "libdspine_trt_plugins.so" in result.stdout
