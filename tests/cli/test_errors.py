"""Every mistake a user can make ends with its exit code, a message that names the cause, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import Invoke

Damage = Callable[[Path], object]


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    for key, value in changes.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def offer_pickle(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"][3, 5] = float("nan")


def not_ready(tensors: dict[str, torch.Tensor]) -> None:
    tensors["transfer_ready"] = torch.tensor(False)


DRAFTER: dict[str, tuple[Damage, str]] = {
    "no config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
    "truncated": (truncate, "model.safetensors"),
    "pickle": (offer_pickle, "pytorch_model.bin"),
    "NaN": (lambda path: edit_tensors(path, poison), "fc.weight"),
    "not ready": (lambda path: edit_tensors(path, not_ready), "transfer_ready"),
    "missing tensor": (lambda path: edit_tensors(path, lambda tensors: tensors.pop("norm.weight")), "norm.weight"),
    "extra tensor": (lambda path: edit_tensors(path, lambda tensors: tensors.update(odd=torch.ones(1))), "odd"),
    "architecture": (lambda path: edit_config(path, architectures=["DSpineDraftModle"]), "DSpineDraftModel"),
    "block size": (lambda path: edit_config(path, block_size=1), "block_size"),
    "K > V": (lambda path: edit_config(path, dspine_config={"top_k": 321}), "top_k"),
    "taps": (lambda path: edit_config(path, dflash_config={"target_layer_ids": [1, 3, 8]}), "8"),
}


@pytest.mark.parametrize("case", DRAFTER)
def test_damaged_drafter(case: str, pair: Path, invoke: Invoke) -> None:
    damage, named = DRAFTER[case]
    damage(pair / "drafter")
    before = sorted(pair.rglob("*"))
    result = invoke("build", pair / "drafter", "--target-model", pair / "target", "-o", pair / "out")
    assert result.code == 3, result.err
    assert named in result.err
    assert "Traceback" not in result.err
    assert sorted(pair.rglob("*")) == before


TARGET: dict[str, tuple[Damage, str]] = {
    "absent": (lambda path: path.rename(path.with_name("gone")), "target"),
    "no lm_head": (lambda path: edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight")), "lm_head"),
    "depth": (lambda path: edit_config(path, num_hidden_layers=5), "layers"),
    "vocabulary": (
        lambda path: edit_tensors(
            path, lambda tensors: tensors.update({name: value[:-1].clone() for name, value in tensors.items()})
        ),
        "vocab",
    ),
    "hidden size": (
        lambda path: (
            edit_config(path, hidden_size=32),
            edit_tensors(
                path, lambda tensors: tensors.update({name: value[:, :32].clone() for name, value in tensors.items()})
            ),
        ),
        "hidden size",
    ),
}


@pytest.mark.parametrize("case", TARGET)
def test_wrong_target(case: str, pair: Path, invoke: Invoke) -> None:
    damage, named = TARGET[case]
    damage(pair / "target")
    result = invoke("build", pair / "drafter", "--target-model", pair / "target", "-o", pair / "out")
    assert result.code == 3, result.err
    assert named in result.err
    assert not (pair / "out").exists()


OPTIONS: dict[str, tuple[list[str], int, str]] = {
    "unknown recipe": (["--recipe", "qwen3-8"], 2, "did you mean 'qwen3-8b'"),
    "recipe of another target": (["--recipe", "qwen3-8b"], 2, "another target"),
    "unknown key": (["--set", "profile.batch.maxx=3"], 2, "did you mean 'max'"),
    "profile order": (["--set", "profile.batch.min=9"], 2, "min <= opt <= max"),
    "profile too small": (["--max-batch-size", "0"], 2, "positive"),
    "float16": (["--dtype", "float16"], 2, "float16 overflows"),
    "unknown target": (["--target", "openvino"], 2, "'trtllm', 'onnx' or 'vllm'"),
    "unknown stage": (["--stop-after", "torch"], 2, "--stop-after"),
    "unknown builder": (["--set", "build.builder=tvm"], 2, "tensorrt-rtx"),
    "absent builder": (["--set", "build.builder=tensorrt"], 4, "tensorrt"),
    "unsupported GPU": (["--set", "build.compute_capability=9.9"], 4, "9.9"),
    "no plugin library": (["--plugin-library", "nowhere.so"], 4, "nowhere.so"),
    "not a plugin library": (["--plugin-library", __file__], 4, "cannot be loaded"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_wrong_option(case: str, pair: Path, invoke: Invoke) -> None:
    if case == "absent builder" and importlib.util.find_spec("tensorrt"):
        pytest.skip("TensorRT is installed")
    options, code, named = OPTIONS[case]
    result = invoke("build", pair / "drafter", "--target-model", pair / "target", "-o", pair / "out", *options)
    assert result.code == code, result.err
    assert named in result.err
    assert not (pair / "out").exists()


def test_missing_arguments(invoke: Invoke) -> None:
    result = invoke("build")
    assert result.code == 2
    assert "CKPT, --target-model, -o" in result.err


def test_resume_refuses_what_the_bundle_decides(tmp_path: Path, invoke: Invoke) -> None:
    result = invoke("build", "--resume", tmp_path, "--dtype", "float32", "--force")
    assert result.code == 2
    result = invoke("build", "--resume", tmp_path, "--target", "onnx")
    assert result.code == 2
    assert "--target trtllm" in result.err
    result = invoke("build", "--resume", tmp_path)
    assert result.code == 2
    assert "not a dspine bundle" in result.err


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["plain", "force"])
def test_output_in_the_way(force: list[str], pair: Path, invoke: Invoke) -> None:
    (pair / "out").mkdir()
    (pair / "out" / "mine.txt").write_text("mine")
    result = invoke("build", pair / "drafter", "--target-model", pair / "target", "-o", pair / "out", *force)
    assert result.code == 7
    assert "not a dspine bundle" in result.err
    assert [path.name for path in (pair / "out").iterdir()] == ["mine.txt"]


def test_json_error_is_one_document(invoke: Invoke, tmp_path: Path) -> None:
    result = invoke("inspect", tmp_path / "nothing", "--json")
    document = json.loads(result.out)
    assert (result.code, document["ok"], document["exit_code"], document["error"]["kind"]) == (
        3,
        False,
        3,
        "CheckpointError",
    )
    assert "error: " in result.err


def test_json_usage_error_is_one_document(invoke: Invoke) -> None:
    result = invoke("inspect", "--jsn", "--json")
    assert result.code == 2
    assert json.loads(result.out)["exit_code"] == 2


def test_internal_error_is_short_and_saved(pair: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    from dspine_export.pipeline import inspect

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(inspect, "inspect_checkpoint", fail)
    result = invoke("inspect", pair / "drafter")
    assert result.code == 1
    assert "Traceback" not in result.err
    saved = Path(result.err.rsplit(" ", 1)[1].strip())
    assert "ZeroDivisionError: a fault of ours" in saved.read_text()
    saved.unlink()
    assert "Traceback" in invoke("--debug", "inspect", pair / "drafter").err
