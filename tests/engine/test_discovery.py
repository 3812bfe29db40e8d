"""Finding a builder, and recognising those that cannot work. The broken packages here are STUBS made by the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dspine_export.errors import DependencyError, UsageError
from dspine_export.lowering.engine import discovery
from dspine_export.lowering.engine.discovery import discover, repair_rtx_library_link, rtx_library_link_missing, select

ROOT = Path(__file__).parents[2]


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def stub_package(folder: Path, name: str, source: str) -> Path:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    return folder


@pytest.mark.parametrize(
    ("package", "source", "says"),
    [
        ("tensorrt", "raise ImportError('libnvonnxparser.so.10: cannot open shared object file')", "libnvonnxparser"),
        ("tensorrt", "raise FileNotFoundError('Could not find: nvinfer_10.dll')", "nvinfer_10"),
        ("tensorrt", "", "no Builder, OnnxParser"),
        ("tensorrt_bindings", "", "only the bindings package"),
    ],
    ids=["no libraries", "no file", "empty package", "bindings alone"],
)
def test_stub_of_tensorrt_is_recognised(tmp_path: Path, package: str, source: str, says: str) -> None:
    stub = stub_package(tmp_path, package, source)
    result = run(
        """
        from dspine_export.errors import DependencyError
        from dspine_export.lowering.engine.discovery import select
        try:
            select("tensorrt")
        except DependencyError as error:
            print(error)
        """,
        stub,
    )
    assert result.returncode == 0, result.stderr
    assert "stub package" in result.stdout and says in result.stdout and "fix: install TensorRT" in result.stdout


def test_auto_passes_over_a_stub(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    stub = stub_package(tmp_path, "tensorrt", "raise ImportError('libnvinfer.so.10: cannot open shared object file')")
    result = run("from dspine_export.lowering.engine.discovery import select; print(select('auto').name)", stub)
    assert result.stdout.strip() == "tensorrt-rtx", result.stderr


def test_nothing_installed_lists_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(DependencyError, match=r"(?s)tensorrt is not installed; tensorrt-rtx: .*--stop-after onnx"):
        select()
    assert not discover("tensorrt-rtx").usable


def test_unknown_name() -> None:
    with pytest.raises(UsageError, match="tensorrt-rtx"):
        select("tensorrt-lite")


def test_link_is_created_once(tmp_path: Path) -> None:
    (tmp_path / "libtensorrt_rtx.so.1").write_bytes(b"library")
    assert rtx_library_link_missing(tmp_path)
    assert repair_rtx_library_link(tmp_path) is True
    assert repair_rtx_library_link(tmp_path) is False
    assert os.readlink(tmp_path / "libtensorrt_rtx.so") == "libtensorrt_rtx.so.1"


def test_dangling_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "libtensorrt_rtx.so.1").write_bytes(b"library")
    (tmp_path / "libtensorrt_rtx.so").symlink_to("libtensorrt_rtx.so.0")
    assert repair_rtx_library_link(tmp_path) is True
    assert (tmp_path / "libtensorrt_rtx.so").read_bytes() == b"library"


def test_unwritable_folder_gives_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libtensorrt_rtx.so.1").write_bytes(b"library")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(discovery.os, "symlink", refuse)
    with pytest.raises(DependencyError, match=r"ln -s libtensorrt_rtx\.so\.1"):
        repair_rtx_library_link(tmp_path)


def test_wheel_without_the_link_is_repaired_before_use(tmp_path: Path) -> None:
    """A copy of the installed libraries without the link: discovery must create it (the parser would abort the process)."""
    installed = discovery.rtx_library_directory()
    if installed is None:
        pytest.skip("tensorrt-rtx is not installed")
    copy = tmp_path / "tensorrt_rtx_libs"
    copy.mkdir()
    (copy / "__init__.py").write_bytes((installed / "__init__.py").read_bytes())
    for library in installed.glob("*.so.*"):
        (copy / library.name).symlink_to(library)
    result = run(
        "from dspine_export.lowering.engine.discovery import select; print(select('tensorrt-rtx').version)", tmp_path
    )
    assert result.returncode == 0 and result.stdout.startswith("1."), result.stderr
    assert os.readlink(copy / "libtensorrt_rtx.so") == "libtensorrt_rtx.so.1"
