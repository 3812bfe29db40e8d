"""Weights: names, shapes, dtypes, values, files and shards."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspine_export.checkpoint.load import check_finite, open_checkpoint
from dspine_export.errors import CheckpointError

Tensors = dict[str, torch.Tensor]


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.pop(name)


REFUSED = {
    "missing_fc": (drop("fc.weight"), "Missing tensors"),
    "missing_layer_norm": (drop("layers.1.input_layernorm.weight"), "layers.1.input_layernorm.weight"),
    "missing_write": (drop("injection.writes.1.weight"), "injection.writes.1.weight"),
    "missing_bias": (drop("injection.bias"), "injection.bias"),
    "extra_layer": (put("layers.2.mlp.up_proj.weight", torch.zeros(2, 2)), "layers.2.mlp.up_proj.weight"),
    "extra_head": (put("markov_head.markov_w1.weight", torch.zeros(2, 2)), "markov_head"),
    "attention_bias_tensor": (put("layers.0.self_attn.q_proj.bias", torch.zeros(48)), "q_proj.bias"),
    "transposed": (put("fc.weight", torch.zeros(48, 96)), "fc.weight has the wrong shape"),
    "norm_shape": (put("norm.weight", torch.zeros(47)), "norm.weight has the wrong shape"),
    "message_shape": (put("injection.message.weight", torch.zeros(16, 8)), "injection.message.weight"),
    "codes_shape": (put("transfer_codes", torch.zeros(200, 15)), "transfer_codes has the wrong shape"),
    "codes_rows": (put("transfer_codes", torch.zeros(201, 16)), "transfer_codes has the wrong shape"),
    "integer_weights": (put("fc.weight", torch.zeros(48, 48, dtype=torch.int8)), "dtype"),
    "float8_weights": (put("fc.weight", torch.zeros(48, 48).to(torch.float8_e4m3fn)), "dtype"),
    "ready_false": (put("transfer_ready", torch.tensor(False)), "never initialised"),
    "ready_missing": (drop("transfer_ready"), "never initialised"),
    "ready_not_bool": (put("transfer_ready", torch.tensor(1.0)), "not a boolean"),
    "ready_vector": (put("transfer_ready", torch.ones(2, dtype=torch.bool)), "not a boolean"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, drafter: Any) -> None:
    edit, message = REFUSED[case]
    edit(drafter.tensors)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(drafter.write())
    assert message in str(error.value)
    assert str(drafter.path) in str(error.value)


@pytest.mark.parametrize("prefix", ["model.", "draft_model."])
def test_uniform_prefix_is_removed(prefix: str, drafter: Any) -> None:
    drafter.tensors = {prefix + name: value for name, value in drafter.tensors.items()}
    assert "fc.weight" in open_checkpoint(drafter.write()).tensors


def test_partial_prefix_is_not(drafter: Any) -> None:
    drafter.tensors["model.fc.weight"] = drafter.tensors.pop("fc.weight")
    with pytest.raises(CheckpointError, match="Missing tensors"):
        open_checkpoint(drafter.write())


def test_copies_of_the_target_are_ignored_with_a_warning(drafter: Any) -> None:
    drafter.tensors |= {"embed_tokens.weight": torch.zeros(200, 48), "lm_head.weight": torch.zeros(200, 48)}
    checkpoint = open_checkpoint(drafter.write())
    assert len(checkpoint.warnings) == 2
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(checkpoint.tensors)


def test_mixed_dtypes(drafter: Any) -> None:
    drafter.tensors["fc.weight"] = drafter.tensors["fc.weight"].bfloat16()
    checkpoint = open_checkpoint(drafter.write())
    check_finite(checkpoint)
    assert checkpoint.tensors.read("fc.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_non_finite_weights(bad: float, dtype: torch.dtype, drafter: Any) -> None:
    weight = drafter.tensors["layers.1.mlp.up_proj.weight"].to(dtype)
    weight[3, 5] = bad
    drafter.tensors["layers.1.mlp.up_proj.weight"] = weight
    checkpoint = open_checkpoint(drafter.write())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds a non-finite") as error:
        check_finite(checkpoint)
    assert f"flat index {3 * weight.shape[1] + 5}" in str(error.value)


def _shard(drafter: Any, count: int = 3) -> tuple[Path, dict[str, Any]]:
    path = drafter.write()
    (path / "model.safetensors").unlink()
    names = sorted(drafter.tensors)
    weight_map = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: drafter.tensors[name] for name in names if weight_map[name] == file}, path / file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path, index


def test_shards(drafter: Any) -> None:
    path, _ = _shard(drafter)
    checkpoint = open_checkpoint(path)
    for name, value in drafter.tensors.items():
        assert torch.equal(checkpoint.tensors.read(name), value)


def test_download_cache_links_are_followed(drafter: Any, tmp_path: Path) -> None:
    path, index = _shard(drafter)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, name in enumerate([*sorted(set(index["weight_map"].values())), "config.json"]):
        (path / name).rename(blobs / str(number))
        (path / name).symlink_to(Path("..") / "blobs" / str(number))
    assert len(open_checkpoint(path).tensors) == len(drafter.tensors)


@pytest.mark.parametrize(
    "name",
    [
        "../escape.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "x.bin",
        "a\u0000.safetensors",
        "",
    ],
)
def test_index_path_escapes(name: str, drafter: Any) -> None:
    path, index = _shard(drafter)
    index["weight_map"]["fc.weight"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="Index points"):
        open_checkpoint(path)


def test_index_and_shards_disagree(drafter: Any) -> None:
    path, index = _shard(drafter)
    file = path / "model.safetensors.index.json"
    for weight_map in ({}, [1], {"fc.weight": 3}, {"fc.weight": ["x"]}):
        file.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match="weight_map"):
            open_checkpoint(path)
    changed = dict(index["weight_map"])
    del changed["fc.weight"]
    file.write_text(json.dumps({"weight_map": changed}))
    with pytest.raises(CheckpointError, match="does not list"):
        open_checkpoint(path)
    file.write_text(json.dumps({"weight_map": index["weight_map"] | {"ghost": index["weight_map"]["fc.weight"]}}))
    with pytest.raises(CheckpointError, match="not in the shard"):
        open_checkpoint(path)


def test_missing_shard(drafter: Any) -> None:
    path, index = _shard(drafter)
    (path / index["weight_map"]["fc.weight"]).unlink()
    with pytest.raises(CheckpointError, match="not found"):
        open_checkpoint(path)


def test_shards_without_an_index(drafter: Any) -> None:
    path, _ = _shard(drafter)
    (path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="no index"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused(name: str, drafter: Any) -> None:
    path = drafter.write()
    (path / "model.safetensors").unlink()
    (path / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    for offered in (path, path / name):
        with pytest.raises(CheckpointError, match=r"Pickle.*\n(.*\n)*.*save_file"):
            open_checkpoint(offered)


def test_truncated_and_empty_weights(drafter: Any) -> None:
    file = drafter.write() / "model.safetensors"
    data = file.read_bytes()
    for size in (0, 100, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            open_checkpoint(drafter.path)


def test_paths_that_are_not_checkpoints(drafter: Any, tmp_path: Path) -> None:
    path = drafter.write()
    for offered, message in (
        (tmp_path / "absent", "not found"),
        (path / "model.safetensors", "not a directory"),
        (tmp_path, "No weights"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(offered)


def test_weights_that_are_a_pipe_do_not_block(drafter: Any) -> None:
    path = drafter.write()
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    with pytest.raises(CheckpointError, match="Not a regular file"):
        open_checkpoint(path)
