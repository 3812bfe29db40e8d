"""Which compute capability a plan is built for, and the refusals."""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any

import pytest

from dspine_export.errors import DependencyError, UsageError
from dspine_export.lowering.engine import target
from dspine_export.lowering.engine.target import resolve_target, set_target

VERSION = "1.7.1.116"


class ComputeCapability(enum.Enum):
    NONE, CURRENT, SM75, SM80, SM86, SM89, SM120, SM121 = range(8)


@pytest.fixture
def rtx() -> Any:
    module = ModuleType("tensorrt_rtx")
    module.ComputeCapability = ComputeCapability  # type: ignore[attr-defined]
    return module


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "device_compute_capability", lambda: None)


def test_default_leaves_the_builders_choice(rtx: Any) -> None:
    found = resolve_target("tensorrt-rtx", VERSION, rtx, None)
    assert (found.label, found.capabilities, found.members, found.warnings) == ("sm80plus", ("8.0+",), (), ())


@pytest.mark.parametrize("text", ["12.0,8.9", "sm_89, sm120", "89,120"])
def test_named_capabilities(rtx: Any, text: str) -> None:
    found = resolve_target("tensorrt-rtx", VERSION, rtx, text)
    assert (found.label, found.members) == ("sm89_sm120", ("SM89", "SM120"))


def test_count_is_set_before_the_entries(rtx: Any) -> None:
    class Config:
        num_compute_capabilities = 0
        calls: list[tuple[Any, int]] = []  # noqa: RUF012

        def set_compute_capability(self, member: Any, index: int) -> bool:
            self.calls.append((member, index))
            return index < self.num_compute_capabilities

    config = Config()
    set_target(rtx, config, resolve_target("tensorrt-rtx", VERSION, rtx, "8.6,8.9"))
    assert config.calls == [(ComputeCapability.SM86, 0), (ComputeCapability.SM89, 1)]


def test_hopper_is_refused_by_name(rtx: Any) -> None:
    with pytest.raises(DependencyError, match=r"TensorRT-RTX 1\.7\.1\.116 does not support compute capability 9\.0"):
        resolve_target("tensorrt-rtx", VERSION, rtx, "9.0")


def test_turing_is_refused(rtx: Any) -> None:
    with pytest.raises(DependencyError, match=r"7\.5 has neither"):
        resolve_target("tensorrt-rtx", VERSION, rtx, "7.5")


@pytest.mark.parametrize("text", ["hopper", "", "8.9;8.6", "8"])
def test_nonsense(rtx: Any, text: str) -> None:
    with pytest.raises(UsageError, match="not a compute capability"):
        resolve_target("tensorrt-rtx", VERSION, rtx, text)


def test_unsupported_gpu_of_this_machine_is_a_warning(rtx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "device_compute_capability", lambda: (9, 0))
    found = resolve_target("tensorrt-rtx", VERSION, rtx, None)
    assert "9.0" in found.warnings[0] and "cannot run here" in found.warnings[0]


def test_tensorrt_builds_for_its_own_gpu_only(rtx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DependencyError, match="none was found"):
        resolve_target("tensorrt", "10.14.1", rtx, None)
    monkeypatch.setattr(target, "device_compute_capability", lambda: (9, 0))
    assert resolve_target("tensorrt", "10.14.1", rtx, None).label == "sm90"
    assert resolve_target("tensorrt", "10.14.1", rtx, "9.0").capabilities == ("9.0",)
    with pytest.raises(DependencyError, match="another GPU"):
        resolve_target("tensorrt", "10.14.1", rtx, "8.9")
