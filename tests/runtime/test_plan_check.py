"""Every mismatch between a plan and its host is named before the plan is read, with the command that rebuilds it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import dspine_plugins
import pytest
from dspine_plugins import ABI_MAJOR, PluginAbi

from dspine_export.bundle import Bundle, DrafterSummary, EngineEntry, FileEntry, Manifest
from dspine_export.errors import DependencyError, DspineError, UsageError, VerificationError
from dspine_export.recipes import Profile, Recipe
from dspine_export.runtime.plan_check import choose_engine

ID = "engines/tensorrt-10.14.1-sm90"
HERE = [("tensorrt", "10.14.1")]
LIBRARY = "plugins/libdspine_trt_plugins.so"
DRAFTER = DrafterSummary(
    architecture="DSpineDraftModel",
    layout="specforge",
    is_causal=True,
    hidden_size=8,
    num_layers=1,
    vocab_size=16,
    block_size=4,
    mask_token_id=15,
    target_layer_ids=(0,),
)


def make_bundle(
    folder: Path, *, layers: tuple[str, ...] = ("walk",), record: bytes | None = None, **changes: Any
) -> Bundle:
    files = {
        f"{ID}/draft.plan": b"draft",
        f"{ID}/context.plan": b"context",
        f"{ID}/build.json": record or json.dumps({"plans": [{"network": {"plugin_layers": list(layers)}}]}).encode(),
        LIBRARY: b"library",
    }
    entries = []
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        entries.append(FileEntry(path=name, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content)))
    values: dict[str, Any] = {
        "id": ID,
        "builder": "tensorrt",
        "builder_version": "10.14.1",
        "sm": "sm90",
        "plans": {entry: f"{ID}/{entry}.plan" for entry in ("draft", "context")},
        "compute_capabilities": ("9.0",),
        "plugin_library": LIBRARY,
        "plugin_abi": f"{ABI_MAJOR}.0",
        "profile": Profile(),
    }
    engine = EngineEntry(**values | changes)
    fields = {"recipe": Recipe(), "drafter": DRAFTER, "sources": (), "versions": {}}
    return Bundle(folder, Manifest(**fields, engines=(engine,), files=tuple(entries)))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def library_abi(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The record inside the library of the test bundles, which is no library."""
    found = {"major": ABI_MAJOR}
    record = lambda path, require_major=None: PluginAbi(found["major"], 0, "0", (10, 14), ("90",), "")  # noqa: E731
    monkeypatch.setattr(dspine_plugins, "load_abi", record)
    return found


def refusal(bundle: Bundle, capability: tuple[int, int] | None = (9, 0), installed: Any = HERE) -> DspineError:
    with pytest.raises(DspineError) as raised:
        choose_engine(bundle, capability, installed)
    return raised.value


def test_fitting_engine(tmp_path: Path) -> None:
    checked = choose_engine(make_bundle(tmp_path), (9, 0), HERE)
    assert checked.entry.id == ID
    assert checked.plans["draft"].read_bytes() == b"draft"
    assert checked.has_plugins


def test_plugins_are_asked_of_the_plans(tmp_path: Path) -> None:
    assert not choose_engine(make_bundle(tmp_path, layers=()), (9, 0), HERE).has_plugins


def test_a_plan_that_carries_its_plugins_needs_no_library(tmp_path: Path) -> None:
    assert not choose_engine(make_bundle(tmp_path, carries_plugins=True), (9, 0), HERE).has_plugins


@pytest.mark.parametrize(
    ("capabilities", "device"), [(("9.0",), (9, 0)), (("8.0+",), (9, 0)), (("8.6", "8.9"), (8, 9))], ids=str
)
def test_covered_gpus(tmp_path: Path, capabilities: tuple[str, ...], device: tuple[int, int]) -> None:
    choose_engine(make_bundle(tmp_path, compute_capabilities=capabilities), device, HERE)


@pytest.mark.parametrize(
    ("changes", "host", "words"),
    [
        pytest.param({}, {"installed": [("tensorrt", "10.15.0")]}, ("10.14.1", "10.15.0"), id="version"),
        pytest.param(
            {}, {"installed": [("tensorrt-rtx", "1.7.1")]}, ("TensorRT 10.14.1", "TensorRT-RTX 1.7.1"), id="library"
        ),
        pytest.param(
            {}, {"installed": []}, ("TensorRT 10.14.1", "no usable TensorRT", "install that"), id="no library"
        ),
        pytest.param({}, {"capability": (8, 9)}, ("8.9", "sm_89", "9.0", "build.compute_capability=8.9"), id="SM"),
        pytest.param({"compute_capabilities": ("9.0+",)}, {"capability": (8, 6)}, ("8.6", "9.0+"), id="older SM"),
        pytest.param(
            {"compute_capabilities": ("9" * 5000 + ".0", "9.\N{ARABIC-INDIC DIGIT ZERO}")}, {}, (), id="odd SM"
        ),
        pytest.param({"plugin_abi": "99.0"}, {}, ("99.0", "plugin ABI major"), id="plugin ABI"),
    ],
)
def test_mismatch(tmp_path: Path, changes: Any, host: Any, words: tuple[str, ...]) -> None:
    error = refusal(make_bundle(tmp_path, **changes), **host)
    assert isinstance(error, DependencyError)
    for word in (*words, f"dspine-export build --resume {tmp_path}"):
        assert word in str(error)


def test_no_gpu(tmp_path: Path) -> None:
    assert "no GPU" in str(refusal(make_bundle(tmp_path), capability=None))


def test_library_of_another_abi_major(tmp_path: Path, library_abi: dict[str, int]) -> None:
    library_abi["major"] = ABI_MAJOR + 1
    error = refusal(make_bundle(tmp_path))
    assert LIBRARY in str(error) and f"{ABI_MAJOR + 1}.0" in str(error)


def test_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built for another processor, for example."""
    monkeypatch.undo()
    error = refusal(make_bundle(tmp_path))
    assert isinstance(error, DependencyError)
    assert "plugin library cannot be loaded" in str(error) and f"build --resume {tmp_path}" in str(error)


@pytest.mark.parametrize(
    "record", [b"{", b"[]", b'{"plans": 5}', b'{"plans": [{"network": 5}]}', b"[" * 100_000, b"\xff"]
)
def test_damaged_record_of_the_build(tmp_path: Path, record: bytes) -> None:
    bundle = make_bundle(tmp_path, record=record)
    error = refusal(bundle)
    assert isinstance(error, VerificationError)
    assert "build.json" in str(error) and "--resume" in str(error)


def test_changed_library_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a library runs code of it, so its hash comes first."""
    opened: list[Path] = []
    monkeypatch.setattr(dspine_plugins, "load_abi", lambda path, require_major=None: opened.append(path))
    bundle = make_bundle(tmp_path)
    (tmp_path / LIBRARY).write_bytes(b"another")
    assert isinstance(refusal(bundle), VerificationError)
    assert opened == []


@pytest.mark.parametrize("name", [f"{ID}/draft.plan", f"{ID}/context.plan", f"{ID}/build.json", LIBRARY])
def test_changed_file(tmp_path: Path, name: str) -> None:
    bundle = make_bundle(tmp_path)
    (tmp_path / name).write_bytes(b"x" * (tmp_path / name).stat().st_size)
    error = refusal(bundle)
    assert isinstance(error, VerificationError)
    assert name in str(error) and "sha256" in str(error) and "--resume" in str(error)


def test_no_engine(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    empty = Bundle(tmp_path, bundle.manifest.model_copy(update={"engines": ()}))
    error = refusal(empty)
    assert isinstance(error, UsageError) and "--resume" in str(error)


def test_the_right_library_explains_best(tmp_path: Path) -> None:
    """With several engines, the mismatch of the one built by the installed library is shown."""
    bundle = make_bundle(tmp_path)
    other = bundle.manifest.engines[0].model_copy(update={"builder": "tensorrt-rtx", "builder_version": "1.7.1"})
    both = Bundle(tmp_path, bundle.manifest.model_copy(update={"engines": (other, *bundle.manifest.engines)}))
    assert "another version of TensorRT" in str(refusal(both, installed=[("tensorrt", "11.0.0")]))
