"""Which GPUs a plan is for.

TensorRT builds for the GPU it runs on. TensorRT-RTX needs none: left alone it builds a plan for compute capability 8.0 and later
(its documented default, and what this module records as ``8.0+``); named capabilities restrict it to those. What a release supports is
read from its ``ComputeCapability`` enumeration, never assumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from dspine_export.errors import DependencyError, UsageError
from dspine_export.lowering.engine.gpu import device_compute_capability

_PORTABLE = "8.0+"
_FIRST_WITH_BF16 = (8, 0)


@dataclass(frozen=True)
class Target:
    """Where a plan may run.

    Attributes:
        label: suffix of the engine's folder, such as ``sm89`` or ``sm80plus``.
        capabilities: compute capabilities, such as ``("8.9",)`` or ``("8.0+",)``.
        members: names to set in the builder's configuration; empty to leave its default.
        warnings: what the user should know, such as this machine's GPU not being among them.
    """

    label: str
    capabilities: tuple[str, ...]
    members: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def resolve_target(name: str, version: str, trt: ModuleType, requested: str | None) -> Target:
    """The target of a build.

    Args:
        name: ``tensorrt`` or ``tensorrt-rtx``.
        version: of the builder, for messages.
        trt: its module.
        requested: such as ``8.9`` or ``8.6,8.9``; None for the builder's default.

    Raises:
        UsageError: not a compute capability.
        DependencyError: one this builder does not support.
    """
    wanted = _parse(requested) if requested is not None else ()
    device = device_compute_capability()
    if name == "tensorrt":
        return _tensorrt_target(version, wanted, device)
    return _rtx_target(version, trt, wanted, device)


def set_target(trt: ModuleType, config: Any, target: Target) -> None:
    """Apply ``target`` to a builder configuration; the count must be set before the entries."""
    if not target.members:
        return
    config.num_compute_capabilities = len(target.members)
    for index, member in enumerate(target.members):
        if not config.set_compute_capability(getattr(trt.ComputeCapability, member), index):
            raise DependencyError(f"the builder refused compute capability {member}", where=trt.__name__)


def _parse(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:sm_?)?(\d{1,2})\.?(\d)\s*", part)
        if match is None:
            raise UsageError("not a compute capability", got=part, expected="such as 8.9, or several: 8.6,8.9,12.0")
        found.append((int(match[1]), int(match[2])))
    return tuple(sorted(set(found)))


def _tensorrt_target(version: str, wanted: tuple[tuple[int, int], ...], device: tuple[int, int] | None) -> Target:
    if device is None:
        raise DependencyError(
            f"TensorRT {version} builds for the GPU of the machine it runs on, and none was found",
            fix="run build --resume where the GPU is, or choose --builder tensorrt-rtx",
        )
    if wanted and wanted != (device,):
        raise DependencyError(
            f"TensorRT {version} cannot build for another GPU than this machine's",
            got=_join(wanted),
            expected=_join((device,)),
        )
    return Target(_label((device,)), (_dotted(device),))


def _rtx_target(
    version: str, trt: ModuleType, wanted: tuple[tuple[int, int], ...], device: tuple[int, int] | None
) -> Target:
    supported = {
        (int(match[1]), int(match[2]))
        for member in trt.ComputeCapability.__members__
        if (match := re.fullmatch(r"SM(\d+)(\d)", member))
    }
    for capability in wanted:
        if capability not in supported:
            raise DependencyError(
                f"TensorRT-RTX {version} does not support compute capability {_dotted(capability)}",
                expected=_join(tuple(sorted(supported))),
                fix="use TensorRT (--builder tensorrt) on that GPU, or stop before the engine with --stop-after onnx",
            )
        if capability < _FIRST_WITH_BF16:
            raise DependencyError(
                f"compute capability {_dotted(capability)} has neither bfloat16 nor TensorRT-RTX's float32 matrix products",
                expected=f"{_dotted(_FIRST_WITH_BF16)} or later",
            )
    warnings = []
    if device is not None and device not in (wanted or supported):
        reason = "is not a target of this plan" if device in supported else f"is unknown to TensorRT-RTX {version}"
        warnings.append(f"this machine's GPU (compute capability {_dotted(device)}) {reason}: the plan cannot run here")
    if not wanted:
        return Target("sm80plus", (_PORTABLE,), (), tuple(warnings))
    members = tuple(f"SM{major}{minor}" for major, minor in wanted)
    return Target(_label(wanted), tuple(map(_dotted, wanted)), members, tuple(warnings))


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _join(capabilities: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(map(_dotted, capabilities))


def _label(capabilities: tuple[tuple[int, int], ...]) -> str:
    return "_".join(f"sm{major}{minor}" for major, minor in capabilities)
