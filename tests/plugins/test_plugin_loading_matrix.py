"""The loading matrix, in the real TensorRT-RTX 1.7 (registry generation 11), one process a case.

| host loads by            | getCreators only    | self-registering, 10 | self-registering, 11       | shim, 10  | shim, 11   |
|--------------------------|---------------------|----------------------|----------------------------|-----------|------------|
| `registry.load_library`  | registered          | crash                | refused as double, crash   | refused   | registered |
| plain dlopen             | not registered      | crash                | registered                 | a message | registered |
| `plugins_to_serialize`   | in the plan, not run | same                | same                       | same      | same       |

10 and 11 are the registry generations a library calls: those of the headers installed here, and the host's own as declared in
registry_of_11. What a deserialising runtime does with a carried library (``engine_host_code_allowed``) needs a GPU and is not covered.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest
from dspine_plugins import PluginLibrary
from dspine_plugins.build import AUTOREG_NAME

from dspine_export.ops_schema import OPS
from tests.plugins.onnx_models import model_of
from tests.plugins.processes import HERE, compile_library, run_python

AUTOREG_SOURCE = HERE.parents[1] / "plugins" / "src" / "autoreg" / "autoreg.cpp"
HOST_GENERATION = 11
CRASH = -signal.SIGSEGV

LOAD = """
import ctypes, sys
import tensorrt_rtx as trt
how, library, model = sys.argv[1:4]
registry = trt.get_plugin_registry()
if how == "load_library":
    print("handle", registry.load_library(library) is not None, flush=True)
if how == "dlopen":
    ctypes.CDLL(library)
print("creators", sum(creator.plugin_namespace.startswith("dspine") for creator in registry.all_creators))
network = (builder := trt.Builder(logger := trt.Logger(trt.Logger.INTERNAL_ERROR))).create_network(0)
parser = trt.OnnxParser(network, logger)
print("parsed" if parser.parse(open(model, "rb").read()) else parser.get_error(0).desc(), flush=True)
"""

SERIALISE = """
profile = builder.create_optimization_profile()
for tensor in map(network.get_input, range(network.num_inputs)):
    if tensor.shape[0] == -1:
        profile.set_shape(tensor.name, *[(n, *tuple(tensor.shape)[1:]) for n in (1, 2, 4)])
carried = open(sys.argv[4], "rb").read()
for libraries in ([], [sys.argv[4]]):
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    config.plugins_to_serialize = libraries
    plan = bytes(builder.build_serialized_network(network, config))
    print("carried" if carried in plan else "not carried")
"""


@dataclass(frozen=True)
class Outcome:
    """Exit status, standard output line by line, and a part of standard error."""

    status: int
    said: tuple[str, ...]
    complaint: str = ""


NOT_FOUND = 'creator && "Plugin not found, are the plugin name, version, and namespace correct?"'
REGISTERED = ("creators 3", "parsed")
OLD_SHIM = "this shim was built with TensorRT 10 headers, the host is TensorRT-RTX 1."
MATRIX = {
    ("load_library", "getCreators"): Outcome(0, ("handle True", *REGISTERED)),
    ("load_library", "self-registering 10"): Outcome(CRASH, ("self-registering",)),
    ("load_library", "self-registering 11"): Outcome(CRASH, ("self-registering", "self-registered", "handle False")),
    ("load_library", "shim 10"): Outcome(0, ("handle False", "creators 0", NOT_FOUND), OLD_SHIM),
    ("load_library", "shim 11"): Outcome(0, ("handle False", *REGISTERED)),
    ("dlopen", "getCreators"): Outcome(0, ("creators 0", NOT_FOUND)),
    ("dlopen", "self-registering 10"): Outcome(CRASH, ("self-registering",)),
    ("dlopen", "self-registering 11"): Outcome(0, ("self-registering", "self-registered", "creators 1", NOT_FOUND)),
    ("dlopen", "shim 10"): Outcome(0, ("creators 0", NOT_FOUND), OLD_SHIM),
    ("dlopen", "shim 11"): Outcome(0, REGISTERED),
    ("nothing", "getCreators"): Outcome(0, ("creators 0", NOT_FOUND)),
}
LIBRARIES = ("getCreators", "self-registering 10", "self-registering 11", "shim 10", "shim 11")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "model.onnx"
    onnx.save(model_of(OPS[0], "float32"), path)
    return path


@pytest.fixture(scope="module")
def library(plugins: PluginLibrary, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A library of the matrix by its column, compiled at first use."""
    folder, made = tmp_path_factory.mktemp("libraries"), {"getCreators": plugins.path, "shim 10": plugins.autoreg}
    (folder / plugins.path.name).symlink_to(plugins.path)  # the shim looks for its sibling beside itself

    def compile_one(name: str) -> Path:
        if name == "shim 11":
            flags = (f"-I{HERE / 'registry_of_11'}", f"-I{HERE.parents[1] / 'plugins' / 'include'}")
            return compile_library(AUTOREG_SOURCE, folder / AUTOREG_NAME, *flags)
        flags = ("-DREGISTRY_OF_11",) if name.endswith("11") else ()
        return compile_library(HERE / "self_registering.cpp", folder / f"lib{name.replace(' ', '_')}.so", *flags)

    def get(name: str) -> Path:
        if name.endswith("10") and plugins.abi.tensorrt_headers[0] >= HOST_GENERATION:
            pytest.skip("the headers installed here are of the host's own generation")
        if name not in made:
            made[name] = compile_one(name)
        path = made[name]
        assert path is not None, f"no {name} was built"
        return path

    return get


@pytest.mark.parametrize(("how", "name"), MATRIX, ids=[" of ".join(key) for key in MATRIX])
def test_loading(
    library: Callable[[str], Path], model: Path, rtx_environment: dict[str, str], how: str, name: str
) -> None:
    wanted = MATRIX[how, name]
    result = run_python(LOAD, how, library(name), model, environment=rtx_environment)
    assert (result.returncode, tuple(result.stdout.splitlines())) == (wanted.status, wanted.said), result.stderr
    assert wanted.complaint in result.stderr


@pytest.mark.parametrize("name", LIBRARIES)
def test_plugins_to_serialize(
    library: Callable[[str], Path], model: Path, rtx_environment: dict[str, str], name: str
) -> None:
    """Whatever file is named travels in the plan, byte for byte; the builder does not open it. Ours registers by getCreators there."""
    arguments = ("load_library", library("getCreators"), model, library(name))
    result = run_python(LOAD + SERIALISE, *arguments, environment=rtx_environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["handle True", *REGISTERED, "not carried", "carried"]


def test_shim_and_library_register_once(
    library: Callable[[str], Path], model: Path, rtx_environment: dict[str, str]
) -> None:
    """A host that loads the library itself after the shim was opened, or opens the shim twice, does no harm."""
    script = f"""
{LOAD}
ctypes.CDLL(library)
print("handle", registry.load_library(sys.argv[4]) is not None)
print("creators", len([creator for creator in registry.all_creators if creator.plugin_namespace == "dspine"]))
"""
    shim, plain = library("shim 11"), library("getCreators")
    result = run_python(script, "dlopen", shim, model, plain, environment=rtx_environment)
    assert (result.returncode, result.stdout.splitlines()) == (0, [*REGISTERED, "handle False", "creators 3"])


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
    """``plugins_to_serialize`` of a recipe, down to the plan: the draft plan grows by the library, the context plan does not."""
    environment = {**rtx_environment, "PYTHONPATH": str(HERE.parents[1])}
    result = run_python(BUILD, plugins.path, tmp_path, environment=environment)
    assert result.returncode == 0, result.stderr
    context, draft, context_carrying, draft_carrying = map(int, result.stdout.split()[-4:])
    size = plugins.path.stat().st_size
    assert size <= draft_carrying - draft < size + 4096
    assert abs(context_carrying - context) < 4096


REFUSE = """
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


@pytest.mark.parametrize("name", ["shim 10", "self-registering 11"])
def test_product_refuses_what_is_not_the_library(
    library: Callable[[str], Path], rtx_environment: dict[str, str], name: str
) -> None:
    """Loaded through the registry these fail without a reason, or crash later; ours is given before."""
    environment = {**rtx_environment, "PYTHONPATH": str(HERE.parents[1])}
    result = run_python(REFUSE, library(name), environment=environment)
    assert result.returncode == 0, result.stderr
    assert "not a DSpine plugin library" in result.stdout
    assert "libdspine_trt_plugins.so" in result.stdout
