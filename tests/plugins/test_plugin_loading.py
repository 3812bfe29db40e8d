"""Every way in which a host may load the plugins, each in a process of its own.

| host loads by                     | libdspine_trt_plugins.so | libdspine_trt_autoreg.so                              |
|-----------------------------------|--------------------------|-------------------------------------------------------|
| `registry.load_library`           | registered, even twice   | -                                                     |
| plain dlopen                      | not registered           | registered once if host and headers are of one major, |
|                                   |                          | else a message and nothing happens                    |
| `config.plugins_to_serialize`     | the plan carries it      | -                                                     |
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from dspine_plugins import PluginLibrary
from dspine_plugins.toolchain import find_headers

from tests.plugins.processes import HERE, run_python

PREAMBLE = """
import ctypes, sys
import tensorrt_rtx as trt
def count():
    return sum(creator.plugin_namespace == "dspine" for creator in trt.get_plugin_registry().all_creators)
"""


def test_registry_loads_the_library(plugins: PluginLibrary, rtx_environment: dict[str, str]) -> None:
    script = PREAMBLE + "trt.get_plugin_registry().load_library(sys.argv[1]); print(count())"
    result = run_python(script, plugins.path, environment=rtx_environment)
    assert (result.returncode, result.stdout.strip()) == (0, "3"), result.stderr


def test_plain_dlopen_registers_nothing_and_spoils_nothing(
    plugins: PluginLibrary, rtx_environment: dict[str, str]
) -> None:
    script = (
        PREAMBLE
        + "ctypes.CDLL(sys.argv[1]); print(count()); trt.get_plugin_registry().load_library(sys.argv[1]); print(count())"
    )
    result = run_python(script, plugins.path, environment=rtx_environment)
    assert (result.returncode, result.stdout.split()) == (0, ["0", "3"]), result.stderr


def test_shim_refuses_a_host_of_another_major(plugins: PluginLibrary, rtx_environment: dict[str, str]) -> None:
    script = PREAMBLE + "shim = ctypes.CDLL(sys.argv[1]); print(count(), shim.dspine_autoreg_header_major())"
    result = run_python(script, plugins.autoreg, environment=rtx_environment)
    headers = plugins.abi.tensorrt_headers[0]
    if headers >= 11:
        pytest.skip("these headers have the registry of TensorRT-RTX 1.7")
    assert (result.returncode, result.stdout.split()) == (0, ["0", str(headers)]), result.stderr
    assert re.search(rf"shim was built with TensorRT {headers} headers, the host is TensorRT-RTX 1\.\d", result.stderr)
    assert "loadLibrary" in result.stderr


def test_shim_without_a_host(plugins: PluginLibrary) -> None:
    result = run_python("import ctypes, sys; ctypes.CDLL(sys.argv[1])", plugins.autoreg)
    assert result.returncode == 0
    assert "no TensorRT in this process yet" in result.stderr


def test_plan_carries_the_library(plugins: PluginLibrary, rtx_environment: dict[str, str], tmp_path: Path) -> None:
    """A plan with the library inside needs no plugin file beside it (the runtime must allow host code)."""
    script = PREAMBLE + SERIALISE
    models = tmp_path / "models"
    models.mkdir()
    run = [str(HERE / "onnx_models.py"), str(models)]
    made = run_python(
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')", *run
    )
    assert made.returncode == 0, made.stderr
    result = run_python(script, plugins.path, models / "AdjacentInjection.float32.onnx", environment=rtx_environment)
    assert result.returncode == 0, result.stderr
    without, carried = map(int, result.stdout.split())
    assert carried - without > plugins.path.stat().st_size // 8


SERIALISE = """
logger = trt.Logger(trt.Logger.ERROR)
trt.get_plugin_registry().load_library(sys.argv[1])
for libraries in ([], [sys.argv[1]]):
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    assert trt.OnnxParser(network, logger).parse(open(sys.argv[2], "rb").read())
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if tensor.shape[0] == -1:
            profile.set_shape(tensor.name, *[(n, *tuple(tensor.shape)[1:]) for n in (1, 2, 4)])
    config.add_optimization_profile(profile)
    config.plugins_to_serialize = libraries
    print(builder.build_serialized_network(network, config).nbytes)
"""


@pytest.fixture(scope="module")
def fake_hosts(plugins: PluginLibrary, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Stand-ins for libnvinfer of the headers' major and of the next one."""
    headers = find_headers()
    cuda = Path(subprocess.run(["which", "nvcc"], capture_output=True, text=True, check=True).stdout.strip())
    includes = [
        path for path in (cuda.resolve().parents[1] / "include", Path("/usr/local/cuda/include")) if path.is_dir()
    ]
    major = plugins.abi.tensorrt_headers[0]
    hosts = {}
    for number in (major, major + 1):
        path = tmp_path_factory.mktemp("host") / f"libnvinfer.so.{number}"
        command = ["g++", "-std=c++17", "-shared", "-fPIC", "-w", f"-DFAKE_MAJOR={number}", "-isystem", str(headers)]
        command += [flag for include in includes for flag in ("-isystem", str(include))]
        subprocess.run([*command, str(HERE / "fake_host.cpp"), "-o", str(path), "-ldl"], check=True)
        hosts[number] = path
    return hosts


def test_shim_registers_once(plugins: PluginLibrary, fake_hosts: dict[int, Path]) -> None:
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL); ctypes.CDLL(sys.argv[2])"
    host = fake_hosts[plugins.abi.tensorrt_headers[0]]
    result = run_python(script, host, plugins.autoreg)
    assert (result.returncode, result.stdout.splitlines()) == (0, ["loadLibrary ok"]), result.stderr


def test_shim_leaves_registered_plugins_alone(plugins: PluginLibrary, fake_hosts: dict[int, Path]) -> None:
    script = """
import ctypes, sys
host = ctypes.CDLL(sys.argv[1])
host.fake_host_load(sys.argv[2].encode())
ctypes.CDLL(sys.argv[3])
"""
    host = fake_hosts[plugins.abi.tensorrt_headers[0]]
    result = run_python(script, host, plugins.path, plugins.autoreg)
    assert (result.returncode, result.stdout.splitlines()) == (0, ["loadLibrary ok"]), result.stderr


def test_shim_refuses_the_next_major(plugins: PluginLibrary, fake_hosts: dict[int, Path]) -> None:
    major = plugins.abi.tensorrt_headers[0]
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); ctypes.CDLL(sys.argv[2])"
    result = run_python(script, fake_hosts[major + 1], plugins.autoreg)
    assert (result.returncode, result.stdout) == (0, "")
    assert f"built with TensorRT {major} headers, the host is TensorRT {major + 1}.3" in result.stderr


def test_shim_without_its_sibling(plugins: PluginLibrary, fake_hosts: dict[int, Path], tmp_path: Path) -> None:
    assert plugins.autoreg is not None
    alone = tmp_path / plugins.autoreg.name
    alone.write_bytes(plugins.autoreg.read_bytes())
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); ctypes.CDLL(sys.argv[2])"
    result = run_python(script, fake_hosts[plugins.abi.tensorrt_headers[0]], alone)
    assert result.returncode == 0
    assert f"could not load {tmp_path}" in result.stderr
