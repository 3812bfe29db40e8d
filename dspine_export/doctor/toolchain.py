"""The plugin library and what it takes to build it."""

from __future__ import annotations

import os
import shutil

from dspine_export.doctor.check import Check, Status
from dspine_export.doctor.probe import ask, first_line_of

_PLUGINS = """
from dspine_export.errors import DspineError
from dspine_plugins import find_plugins
from dspine_plugins.toolchain import find_headers
def told(error):
    return {key: str(getattr(error, key)) for key in ("what", "got", "fix") if getattr(error, key) is not None}
try:
    answer["headers"] = str(find_headers())
except DspineError as error:
    answer["no_headers"] = told(error)
try:
    library = find_plugins()
    if library is not None:
        abi = library.abi
        headers = ".".join(map(str, abi.tensorrt_headers))
        answer["library"] = str(library.path)
        answer["abi"] = f"ABI {abi.major}.{abi.minor}, TensorRT {headers} headers, sm_{', sm_'.join(abi.architectures)}"
        answer["abi"] += ", with autoreg shim" if library.autoreg else ", no autoreg shim"
except DspineError as error:
    answer["no_library"] = told(error)
"""


def check_compilers() -> list[Check]:
    """nvcc and CMake, needed only to build the plugin library."""
    checks = []
    for name, fix in (("nvcc", "install the CUDA toolkit (13.0 or newer)"), ("cmake", "pip install cmake")):
        path = shutil.which(name)
        if path is None:
            checks.append(Check(name, "absent", "not on PATH; needed to build the plugin library", fix))
            continue
        lines = first_line_of([path, "--version"]) if name == "cmake" else _nvcc_release(path)
        checks.append(Check(name, "ok", f"{lines or 'of unknown version'} ({path})"))
    return checks


def check_plugins() -> list[Check]:
    """TensorRT's headers, and a plugin library that was built before, asked for its ABI without TensorRT."""
    answer = ask(_PLUGINS)
    if answer.problem:
        return [Check("plugin library", "broken", answer.problem)]
    found = answer.values
    headers = (
        Check("TensorRT headers", "ok", found["headers"])
        if found.get("headers")
        else _problem("TensorRT headers", found["no_headers"])
    )
    if found.get("no_library"):
        return [headers, _problem("plugin library", found["no_library"], status="broken")]
    if not found.get("library"):
        return [headers, Check("plugin library", "absent", "not built yet; build does it when an engine is wanted")]
    return [headers, Check("plugin library", "ok", f"{found['library']} ({found['abi']})")]


def check_tritonserver() -> list[Check]:
    """The tritonserver program, where the generated launch.sh would look for it, and what its Python backend needs."""
    home = os.environ.get("TRITON_HOME", "/opt/tritonserver")
    path = shutil.which("tritonserver", path=os.pathsep.join((f"{home}/bin", os.environ.get("PATH", ""))))
    if path is None:
        fix = "serve in NVIDIA's container, or set TRITON_HOME to where the server is; triton-repo works without"
        return [Check("tritonserver", "absent", f"not in {home}/bin and not on PATH", fix)]
    return [Check("tritonserver", "ok", path)]


def _nvcc_release(path: str) -> str | None:
    import subprocess

    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return next((line.strip() for line in output.splitlines() if "release" in line), None)


def _problem(name: str, error: dict[str, str], status: Status = "absent") -> Check:
    detail = f"{error['what']}: {error['got']}" if error.get("got") else error["what"]
    return Check(name, status, detail, error.get("fix"))
