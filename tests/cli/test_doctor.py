"""``doctor`` recognises each kind of broken machine, and repairs the one it can."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dspine_export.doctor import builders, probe, toolchain

from .conftest import Cli

STUB_BINDINGS = "raise ImportError('libnvonnxparser.so.10: cannot open shared object file')"


@pytest.fixture
def extra_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the child's module search path."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_everything_is_reported(cli: Cli) -> None:
    result = cli("doctor", "--json")
    document = json.loads(result.stdout)
    names = [check["name"] for check in document["checks"]]
    assert {
        "Python",
        "torch",
        "onnxruntime",
        "TensorRT",
        "TensorRT-RTX",
        "plugin library",
        "nvcc",
        "GPU",
        "memory",
        "disk",
    } <= set(names)
    assert result.returncode == (0 if document["healthy"] else 4)
    assert all(check.get("fix") for check in document["checks"] if check["status"] == "broken")


def test_stub_package(extra_path: Path) -> None:
    (extra_path / "tensorrt.py").write_text(STUB_BINDINGS)
    (check,) = builders.check_builder("tensorrt", fix=False)
    assert check.status == "broken"
    assert "stub" in check.detail
    assert "libnvonnxparser" in check.detail
    assert check.fix


def test_bindings_without_front_package(extra_path: Path) -> None:
    if "tensorrt" in sys.modules:
        pytest.skip("TensorRT is installed")
    (extra_path / "tensorrt_bindings.py").write_text("")
    (check,) = builders.check_builder("tensorrt", fix=False)
    assert check.status == "broken"
    assert "bindings" in check.detail


@pytest.fixture
def wheel_without_link(extra_path: Path) -> Path:
    """TensorRT-RTX's wheel as it is published: the versioned library alone."""
    libraries = extra_path / "tensorrt_rtx_libs"
    libraries.mkdir()
    (libraries / "__init__.py").write_text("")
    (libraries / "libtensorrt_rtx.so.1").write_text("")
    (extra_path / "tensorrt_rtx.py").write_text("__version__ = '1.7.1'\nclass Builder: ...\nclass OnnxParser: ...\n")
    return libraries


def test_missing_link_is_found_and_left_alone(wheel_without_link: Path) -> None:
    (check,) = builders.check_builder("tensorrt-rtx", fix=False)
    assert check.status == "broken"
    assert "--fix" in str(check.fix)
    assert not (wheel_without_link / "libtensorrt_rtx.so").exists()


def test_missing_link_is_repaired(wheel_without_link: Path) -> None:
    (check,) = builders.check_builder("tensorrt-rtx", fix=True)
    assert check.status == "ok"
    assert "created" in check.detail
    assert (wheel_without_link / "libtensorrt_rtx.so").resolve().name == "libtensorrt_rtx.so.1"


@pytest.mark.parametrize(("device", "status"), [([8, 9], "ok"), ([9, 0], "warning")])
def test_gpu_that_the_builder_does_not_support(device: list[int], status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "device": device,
        "link_missing": False,
        "usable": True,
        "version": "1.7.1",
        "supported": [[8, 6], [8, 9]],
    }
    monkeypatch.setattr(builders, "ask", lambda code, **arguments: probe.Answer(values))
    _, check = builders.check_builder("tensorrt-rtx", fix=False)
    assert check.status == status


def test_abort_in_a_library_is_survived() -> None:
    answer = probe.ask("import os; os.abort()")
    assert "SIGABRT" in str(answer.problem)


def test_plugin_library_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "libdspine_trt_plugins.so"
    file.write_text("not a library")
    monkeypatch.setenv("DSPINE_PLUGIN_LIBRARY", str(file))
    check = toolchain.check_plugins()[-1]
    assert check.status == "broken"
    assert check.fix


def test_headers_named_but_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path))
    check = toolchain.check_plugins()[0]
    assert check.status != "ok"
    assert str(tmp_path) in check.detail or "TENSORRT_ROOT" in str(check.fix)
