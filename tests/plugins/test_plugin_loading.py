"""The shim and its host, each case in a process of its own; the whole table of hosts and libraries is test_plugin_loading_matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
from dspine_plugins import PluginLibrary

from tests.plugins.processes import HERE, compile_library, run_python


def test_shim_without_a_host(plugins: PluginLibrary) -> None:
    result = run_python("import ctypes, sys; ctypes.CDLL(sys.argv[1])", plugins.autoreg)
    assert result.returncode == 0
    assert "no TensorRT in this process yet" in result.stderr


@pytest.fixture(scope="module")
def fake_hosts(plugins: PluginLibrary, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Stand-ins for libnvinfer of the headers' major and of the next one."""
    major = plugins.abi.tensorrt_headers[0]
    hosts = {}
    for number in (major, major + 1):
        path = tmp_path_factory.mktemp("host") / f"libnvinfer.so.{number}"
        hosts[number] = compile_library(HERE / "fake_host.cpp", path, f"-DFAKE_MAJOR={number}")
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


@pytest.fixture(scope="module")
def self_registering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(HERE / "self_registering.cpp", tmp_path_factory.mktemp("self") / "libself_registering.so")


@pytest.mark.parametrize(
    ("load", "said"),
    [
        pytest.param("ctypes.CDLL(sys.argv[2])", ["self-registering", "self-registered"], id="plain dlopen"),
        pytest.param(
            "host.fake_host_load(sys.argv[2].encode())",
            ["self-registering", "self-registered", "loadLibrary failed"],
            id="loadLibrary, a second registration",
        ),
    ],
)
def test_self_registering_library_in_a_host_of_its_headers_major(
    plugins: PluginLibrary, fake_hosts: dict[int, Path], self_registering: Path, load: str, said: list[str]
) -> None:
    """What the shim avoids: it looks for the creators first, so that loading it and the library, in either order, registers once."""
    script = f"import ctypes, sys; host = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)\n{load}"
    result = run_python(script, fake_hosts[plugins.abi.tensorrt_headers[0]], self_registering)
    assert (result.returncode, result.stdout.splitlines()) == (0, said), result.stderr
