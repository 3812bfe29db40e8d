"""One build of the plugin libraries for the session; tests that need nvcc or TensorRT-RTX skip where those are missing."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from dspine_plugins import PluginLibrary, build_plugins, find_plugins
from dspine_plugins.toolchain import ARCHITECTURES_VARIABLE, find_toolchain

from dspine_export.errors import DependencyError


@pytest.fixture(scope="session")
def plugin_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the three built libraries, one architecture unless DSPINE_PLUGIN_ARCHS says otherwise."""
    try:
        find_toolchain()
    except DependencyError as error:
        pytest.skip(f"plugins cannot be built here: {error.what}")
    directory = tmp_path_factory.mktemp("plugins")
    archs = None if os.environ.get(ARCHITECTURES_VARIABLE) else ["90"]
    build_plugins(directory, archs=archs, harness=True)
    return directory


@pytest.fixture(scope="session")
def plugins(plugin_directory: Path) -> PluginLibrary:
    found = find_plugins(plugin_directory)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def rtx_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that may import TensorRT-RTX, whose parser opens a library name that its wheel does not install."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if spec is None or spec.origin is None:
        pytest.skip("tensorrt-rtx-cu13 is not installed")
    library = Path(spec.origin).parent / "libtensorrt_rtx.so.1"
    links = tmp_path_factory.mktemp("rtx")
    (links / "libtensorrt_rtx.so").symlink_to(library)
    search = os.pathsep.join(filter(None, (str(links), os.environ.get("LD_LIBRARY_PATH"))))
    return {**os.environ, "LD_LIBRARY_PATH": search, "OMP_NUM_THREADS": "1"}
