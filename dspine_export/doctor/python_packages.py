"""Python itself and its packages."""

from __future__ import annotations

import importlib.metadata
import platform
import sys

from dspine_export.doctor.check import Check
from dspine_export.doctor.probe import ask

_OLDEST_PYTHON = (3, 10)
_REQUIRED = ("torch", "onnx", "onnxscript", "onnxruntime", "transformers")
_OPTIONAL = {"vllm": "vllm", "tensorrt_llm": "trtllm", "tritonclient": "triton"}
_IMPORT = """
import importlib
module = importlib.import_module(arguments["name"])
answer["version"] = str(getattr(module, "__version__", "of unknown version"))
if arguments["name"] == "torch":
    answer["extra"] = f"CUDA {module.version.cuda}" if module.version.cuda else "CPU build"
elif arguments["name"] == "onnxruntime":
    answer["extra"] = ", ".join(module.get_available_providers())
"""


def check_python() -> list[Check]:
    """The interpreter."""
    found = f"{platform.python_implementation()} {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info < _OLDEST_PYTHON:
        return [Check("Python", "broken", found, "use Python 3.10 or newer")]
    return [Check("Python", "ok", found)]


def check_required(name: str) -> list[Check]:
    """Import one package that every build needs."""
    answer = ask(_IMPORT, name=name)
    if answer.problem:
        return [Check(name, "broken", answer.problem, "pip install dspine-export")]
    extra = answer.values.get("extra")
    return [Check(name, "ok", f"{answer.values['version']} ({extra})" if extra else answer.values["version"])]


def required_packages() -> tuple[str, ...]:
    """Names for `check_required`."""
    return _REQUIRED


def check_optional() -> list[Check]:
    """Serving packages, by their metadata alone: importing them takes long and needs a GPU."""
    checks = []
    for name, extra in _OPTIONAL.items():
        try:
            checks.append(Check(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            checks.append(Check(name, "absent", "not installed (optional)", f"pip install 'dspine-export[{extra}]'"))
    return checks
