"""TensorRT and TensorRT-RTX: real, stub, without libraries, or with the library link missing that its parser opens."""

from __future__ import annotations

from typing import Any

from dspine_export.doctor.check import Check
from dspine_export.doctor.probe import ask

_DISCOVER = """
from dspine_export.lowering.engine import discovery
from dspine_export.lowering.engine.gpu import device_compute_capability
answer["device"] = device_compute_capability()
answer["link_missing"] = arguments["name"] == "tensorrt-rtx" and discovery.rtx_library_link_missing()
if answer["link_missing"] and arguments["fix"]:
    answer["repaired"] = discovery.repair_rtx_library_link()
    answer["link_missing"] = False
if not answer["link_missing"]:
    found = discovery.discover(arguments["name"])
    answer.update(version=found.version, problem=found.problem, fix=found.fix, usable=found.usable)
    answer["installed"] = found.usable or "not installed" not in found.problem
    if found.usable and hasattr(found.module, "ComputeCapability"):
        import re
        names = (re.fullmatch(r"SM(\\d+)(\\d)", name) for name in found.module.ComputeCapability.__members__)
        answer["supported"] = sorted([int(name[1]), int(name[2])] for name in names if name)
"""
_DISPLAY = {"tensorrt": "TensorRT", "tensorrt-rtx": "TensorRT-RTX"}


def check_builder(name: str, *, fix: bool) -> list[Check]:
    """One engine builder; with ``fix`` the missing library link of TensorRT-RTX is created."""
    display = _DISPLAY[name]
    answer = ask(_DISCOVER, name=name, fix=fix)
    if answer.problem:
        return [Check(display, "broken", answer.problem)]
    found = answer.values
    if found["link_missing"]:
        detail = "its package lacks the link libtensorrt_rtx.so; the ONNX parser would abort at the first plugin"
        return [Check(display, "broken", detail, "dspine-export doctor --fix")]
    if not found["usable"]:
        return [Check(display, "broken" if found["installed"] else "absent", found["problem"], found["fix"])]
    detail = f"{found['version']}{', missing library link created' if found.get('repaired') else ''}"
    return [Check(display, "ok", detail), *_gpu_support(display, found)]


def _gpu_support(display: str, found: dict[str, Any]) -> list[Check]:
    device, supported = found["device"], found.get("supported")
    if device is None or not supported:
        return []
    dotted = f"{device[0]}.{device[1]}"
    if device in supported:
        return [Check(f"{display} on this GPU", "ok", f"supports compute capability {dotted}")]
    known = ", ".join(f"{major}.{minor}" for major, minor in supported)
    detail = f"{found['version']} does not support compute capability {dotted} (it supports {known})"
    return [
        Check(
            f"{display} on this GPU",
            "warning",
            detail,
            "use TensorRT on this GPU; plans for other GPUs can still be built here",
        )
    ]
