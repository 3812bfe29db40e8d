"""The build: what it needs, what it produces, and what it says when something is missing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from dspine_plugins import ABI_MAJOR, PluginLibrary, build_plugins, find_plugins, load_abi
from dspine_plugins.build import AUTOREG_NAME, LIBRARY_NAME, source_hash
from dspine_plugins.toolchain import DEFAULT_ARCHITECTURES, find_headers, find_toolchain, select_architectures

from dspine_export.errors import DependencyError, UsageError
from dspine_export.version import __version__


def _symbols(path: Path, kind: str) -> list[str]:
    listing = subprocess.run(["nm", "-D", kind, str(path)], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1].split("@")[0] for line in listing.splitlines()]


def test_only_the_agreed_symbols_are_exported(plugins: PluginLibrary) -> None:
    assert sorted(_symbols(plugins.path, "--defined-only")) == ["dspine_plugins_abi", "getCreators", "setLoggerFinder"]
    assert plugins.autoreg is not None
    assert _symbols(plugins.autoreg, "--defined-only") == ["dspine_autoreg_header_major"]


@pytest.mark.parametrize("name", [LIBRARY_NAME, AUTOREG_NAME])
def test_nothing_but_the_c_library_is_needed(plugin_directory: Path, name: str) -> None:
    dynamic = subprocess.run(
        ["readelf", "-d", plugin_directory / name], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert all(re.match(r"(libc|libm|libdl|librt|libpthread|ld-linux.*)\.so", item) for item in needed), needed
    undefined = _symbols(plugin_directory / name, "--undefined-only")
    assert not [symbol for symbol in undefined if "nvinfer" in symbol or "PluginRegistry" in symbol]


def test_abi_record(plugins: PluginLibrary) -> None:
    assert plugins.abi.major == ABI_MAJOR
    assert plugins.abi.version == __version__
    assert plugins.abi.source_hash == source_hash()
    assert plugins.abi.tensorrt_headers[0] >= 10
    assert "90" in plugins.abi.architectures


def test_abi_major_of_the_header_is_the_readers() -> None:
    header = (Path(find_plugins.__code__.co_filename).parent / "include" / "dspine" / "abi.h").read_text(
        encoding="utf-8"
    )
    assert re.search(rf"#define DSPINE_ABI_MAJOR {ABI_MAJOR}\b", header)


def test_another_abi_major_is_refused(plugins: PluginLibrary) -> None:
    with pytest.raises(DependencyError, match="another ABI major") as caught:
        load_abi(plugins.path, require_major=ABI_MAJOR + 1)
    assert str(ABI_MAJOR) in str(caught.value)
    assert "rebuild" in str(caught.value)


def test_a_foreign_library_is_refused(plugins: PluginLibrary, tmp_path: Path) -> None:
    assert plugins.autoreg is not None
    with pytest.raises(DependencyError, match="not found"):
        load_abi(tmp_path / LIBRARY_NAME)
    garbage = tmp_path / LIBRARY_NAME
    garbage.write_bytes(b"not an ELF file")
    with pytest.raises(DependencyError, match="cannot be loaded"):
        load_abi(garbage)


def test_second_build_comes_from_the_cache(plugins: PluginLibrary, tmp_path: Path) -> None:
    again = build_plugins(tmp_path / "new" / "directory", archs=plugins.abi.architectures, harness=True)
    assert again.path.read_bytes() == plugins.path.read_bytes()
    assert again.autoreg is not None


def test_find_plugins(plugins: PluginLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_plugins(tmp_path) is None
    found = find_plugins()
    assert found is not None and found.abi.source_hash == source_hash()
    monkeypatch.setenv("DSPINE_PLUGIN_LIBRARY", str(plugins.path))
    named = find_plugins()
    assert named is not None and named.path == plugins.path
    monkeypatch.setenv("DSPINE_PLUGIN_LIBRARY", str(tmp_path / "missing.so"))
    with pytest.raises(DependencyError, match="not found"):
        find_plugins()


def test_missing_headers_name_the_package(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match=r"kernel-lens==2\.0\.1"):
        find_headers(tmp_path)


def test_old_headers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "NvInferRuntime.h").touch()
    (tmp_path / "NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 8\n")
    with pytest.raises(DependencyError, match="too old") as caught:
        find_headers(tmp_path)
    assert "TensorRT 8" in str(caught.value)


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(DependencyError, match="nvcc not found"):
        find_toolchain()


def test_architectures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_architectures(["9.0", 80, "90"]) == ("80", "90")
    monkeypatch.setenv("DSPINE_PLUGIN_ARCHS", "120,90")
    assert select_architectures() == ("90", "120")
    monkeypatch.delenv("DSPINE_PLUGIN_ARCHS")
    monkeypatch.setenv("PATH", "")
    assert select_architectures() == DEFAULT_ARCHITECTURES


@pytest.mark.parametrize("bad", ["75", "sm_90", "", "9"])
def test_unsupported_architecture(bad: str) -> None:
    with pytest.raises(UsageError, match="unsupported GPU architecture"):
        select_architectures([bad])
