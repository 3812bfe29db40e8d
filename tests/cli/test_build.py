"""Whole builds in real processes: interrupted, killed, finished, resumed, verified."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dspine_export.bundle import open_bundle

from .conftest import COMMAND, ROOT, Cli, Invoke

RTX = "tensorrt-rtx"


def build_arguments(pair: Path, output: Path) -> list[str]:
    return [
        "build",
        str(pair / "drafter"),
        "--target-model",
        str(pair / "target"),
        "-o",
        str(output),
        "--max-seq-len",
        "128",
    ]


def start_and_wait(arguments: list[str], line: str) -> subprocess.Popen[str]:
    """Start a command and return once a stderr line begins with ``line``."""
    process = subprocess.Popen(
        [*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for text in process.stderr:
        if text.startswith(line):
            return process
    raise AssertionError(f"{line!r} never came")


@dataclass(frozen=True)
class Built:
    folder: Path
    output: Path
    after_kill: list[str]
    document: dict[str, object]


@pytest.fixture(scope="session")
def built(shared_pair: Path, tmp_path_factory: pytest.TempPathFactory, cli: Cli) -> Built:
    """A bundle without engine, built after a build of the same output was killed with SIGKILL."""
    folder = tmp_path_factory.mktemp("built")
    output = folder / "out"
    victim = start_and_wait([*build_arguments(shared_pair, output), "--stop-after", "onnx"], "drafter ")
    victim.kill()
    victim.communicate()
    after_kill = sorted(path.name for path in folder.iterdir())
    result = cli(*build_arguments(shared_pair, output), "--stop-after", "onnx", "--json")
    assert result.returncode == 0, result.stderr
    return Built(folder, output, after_kill, json.loads(result.stdout))


def test_killed_build_leaves_only_its_staging(built: Built) -> None:
    assert "out" not in built.after_kill
    assert any(name.startswith(".out.building-") for name in built.after_kill)
    assert [path.name for path in built.folder.iterdir()] == ["out"], "the next build removed it"


def test_bundle_content(built: Built) -> None:
    bundle = open_bundle(built.output, check_hashes=True)
    names = {entry.path for entry in bundle.manifest.files}
    assert {"drafter/config.json", "drafter/model.safetensors"} <= names
    assert {f"{folder}/{entry}.onnx" for folder in ("onnx", "portable") for entry in ("context", "draft")} <= names
    assert bundle.manifest.stage_names == ("drafter", "fused onnx", "portable onnx", "verify", "trtllm")
    assert {source.name for source in bundle.manifest.sources} == {"config.json", "model.safetensors"}
    assert set(bundle.manifest.entries) == {"context", "draft"}
    (verification,) = bundle.manifest.verification
    assert verification.passed
    assert verification.tokens > 0
    assert built.document["ok"] is True
    assert built.document["manifest"] == json.loads((built.output / "manifest.json").read_text())


def test_bundle_does_not_know_where_it_was_made(built: Built) -> None:
    # TensorRT-LLM takes the drafter's place from its configuration; those two files are the operator's to edit.
    serving = {built.output / "trtllm/config.yaml", built.output / "trtllm/triton/tensorrt_llm/1/model.yaml"}
    for path in built.output.rglob("*"):
        if path.is_file() and path not in serving:
            assert str(built.folder).encode() not in path.read_bytes(), path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_interrupted_build(number: signal.Signals, shared_pair: Path, tmp_path: Path) -> None:
    process = start_and_wait(build_arguments(shared_pair, tmp_path / "deep" / "out"), "drafter ")
    process.send_signal(number)
    time.sleep(0.05)
    process.send_signal(number)  # impatience must not spoil the clean-up
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_second_build_needs_force(built: Built, shared_pair: Path, invoke: Invoke) -> None:
    result = invoke(*build_arguments(shared_pair, built.output))
    assert result.code == 7
    assert "--force" in result.err


def test_build_of_a_locked_output(built: Built, shared_pair: Path, tmp_path: Path, invoke: Invoke) -> None:
    holder = start_and_wait(build_arguments(shared_pair, tmp_path / "out"), "drafter ")
    try:
        result = invoke(*build_arguments(shared_pair, tmp_path / "out"))
        assert result.code == 7
        assert f"process {holder.pid}" in result.err
    finally:
        holder.send_signal(signal.SIGINT)
        holder.communicate(timeout=60)


def test_resume_adds_an_engine_anywhere(built: Built, tmp_path: Path, cli: Cli) -> None:
    pytest.importorskip("tensorrt_rtx")
    moved = shutil.copytree(built.output, tmp_path / "moved" / "out")
    result = cli("build", "--resume", moved, "--set", f"build.builder={RTX}", "--json")
    assert result.returncode == 0, result.stderr
    bundle = open_bundle(moved, check_hashes=True)
    (engine,) = bundle.manifest.engines
    assert engine.builder == RTX
    assert engine.id.startswith(f"engines/{RTX}-{engine.builder_version}-")
    assert set(engine.plans) == {"context", "draft"}
    assert bundle.manifest.stage_names[-3:] == ("plugins", "engine", "trtllm")
    assert (
        bundle.file("drafter/model.safetensors").read_bytes()
        == (built.output / "drafter/model.safetensors").read_bytes()
    )
    assert [path.name for path in moved.parent.iterdir()] == ["out"]


def test_resume_refuses_a_damaged_bundle(built: Built, tmp_path: Path, invoke: Invoke) -> None:
    copy = shutil.copytree(built.output, tmp_path / "out")
    (copy / "onnx" / "draft.onnx").write_bytes(b"x")
    result = invoke("build", "--resume", copy)
    assert result.code == 6
    assert "draft.onnx" in result.err


def test_verify_command(built: Built, shared_pair: Path, invoke: Invoke) -> None:
    result = invoke("verify", built.output, "--target-model", shared_pair / "target", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["verification"]["passed"] is True
    assert "not compared" in invoke("verify", built.output).out


@pytest.mark.parametrize("name", ["drafter/model.safetensors", "portable/weights.safetensors"])
def test_run_refuses_a_changed_bundle(
    built: Built, shared_pair: Path, tmp_path: Path, invoke: Invoke, name: str
) -> None:
    """One byte of a weight: the size is right, the tokens would not be."""
    copy = shutil.copytree(built.output, tmp_path / "out")
    data = bytearray((copy / name).read_bytes())
    data[-1] ^= 1
    (copy / name).write_bytes(data)
    result = invoke("run", copy, "--target-model", shared_pair / "target", "-p", "x")
    assert result.code == 6
    assert name in result.err


def test_verify_names_what_changed(built: Built, tmp_path: Path, invoke: Invoke) -> None:
    copy = shutil.copytree(built.output, tmp_path / "out")
    path = copy / "portable" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    result = invoke("verify", copy)
    assert result.code == 6
    assert "weights.safetensors" in result.err


def test_dry_run_writes_nothing(shared_pair: Path, tmp_path: Path, invoke: Invoke) -> None:
    result = invoke(*build_arguments(shared_pair, tmp_path / "out"), "--dry-run", "--json")
    assert result.code == 0, result.err
    document = json.loads(result.out)
    assert document["stages"][-1] == "manifest"
    assert document["recipe"]["profile"]["context"]["max"] == 128
    assert list(tmp_path.iterdir()) == []
    assert "nothing was written" in invoke(*build_arguments(shared_pair, tmp_path / "out"), "--dry-run").out


def test_failed_verification_exits_6(
    built: Built, shared_pair: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph whose weights differ by a little is caught, named, and not published."""
    from dspine_export.pipeline import build

    def export_wrongly(pair: object, recipe: object, staging: Path, stages: object) -> None:
        for folder in ("onnx", "portable"):
            shutil.copytree(built.output / folder, staging / folder)
        tensors = load_file(staging / "portable" / "weights.safetensors")
        original = (staging / "portable" / "weights.safetensors").read_bytes()
        values = tensors["norm.weight"].numpy().tobytes()
        assert original.count(values) == 1
        changed = (tensors["norm.weight"] * 1.01).numpy().tobytes()
        (staging / "portable" / "weights.safetensors").write_bytes(original.replace(values, changed))

    monkeypatch.setattr(build, "export_graphs", export_wrongly)
    result = invoke(*build_arguments(shared_pair, tmp_path / "out"), "--stop-after", "onnx")
    assert result.code == 6
    assert "draft.onnx: transition_scores" in result.err
    assert list(tmp_path.iterdir()) == []


def test_plugin_library_comes_from_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by option, by environment, or taken from an earlier build on a machine without compiler."""
    from dspine_plugins import find_plugins

    from dspine_export.errors import DependencyError
    from dspine_export.pipeline import engines
    from dspine_export.pipeline.progress import Silent

    known = find_plugins()
    if known is None:
        pytest.skip("no plugin library was built here")

    def no_compiler(folder: Path) -> None:
        raise DependencyError("nvcc not found")

    monkeypatch.setattr(engines, "build_plugins", no_compiler)
    for name, given in (("earlier", None), ("option", known.path)):
        (tmp_path / name).mkdir()
        copied = engines.provide_plugins(tmp_path / name, given, Silent())
        assert copied.read_bytes() == known.path.read_bytes()
    monkeypatch.setenv("DSPINE_PLUGIN_LIBRARY", str(tmp_path / "nowhere.so"))
    with pytest.raises(DependencyError):
        engines.provide_plugins(tmp_path, None, Silent())
