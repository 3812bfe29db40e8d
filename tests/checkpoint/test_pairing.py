"""Drafter and target: what must agree, and what is only worth a warning."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.checkpoint.pairing import check_pairing, read_target
from dspine_export.errors import CheckpointError


def _resize(target: Any, rows: int, width: int = 48) -> None:
    for name in list(target.tensors):
        target.tensors[name] = torch.zeros(rows, width)
    target.config.update(hidden_size=width)


def test_a_fitting_pair(drafter: Any, target: Any) -> None:
    info = read_target(target.write())
    assert (info.hidden_size, info.vocab_size, info.num_layers, info.tie_word_embeddings) == (48, 200, 6, False)
    assert info.architecture == "Qwen3ForCausalLM"
    assert torch.equal(info.read_embed_tokens(), target.tensors["model.embed_tokens.weight"])
    assert torch.equal(info.read_lm_head(), target.tensors["lm_head.weight"])
    assert check_pairing(open_checkpoint(drafter.write()), info) == []


def test_tied_and_sharded_target(target: Any) -> None:
    del target.tensors["lm_head.weight"]
    target.config["tie_word_embeddings"] = True
    path = target.write()
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    info = read_target(path)
    assert info.lm_head == info.embed
    assert info.tie_word_embeddings


# name: (edit of the pair, message)
MISFITS = {
    "hidden_size": (lambda d, t: _resize(t, 200, 64), "hidden size"),
    "vocabulary_smaller": (lambda d, t: _resize(t, 190), "vocabulary"),
    "vocabulary_padded": (lambda d, t: _resize(t, 256), "vocabulary"),
    "depth": (lambda d, t: t.config.update(num_hidden_layers=7), "another depth"),
    "tap_beyond_depth": (
        lambda d, t: (d.config.pop("num_target_layers"), t.config.update(num_hidden_layers=2)), "beyond the target's depth",
    ),
    "no_lm_head": (lambda d, t: t.tensors.pop("lm_head.weight"), "lm_head.weight"),
    "no_embedding": (lambda d, t: t.tensors.pop("model.embed_tokens.weight"), "embed_tokens"),
    "matrix_shape": (lambda d, t: t.tensors.update({"lm_head.weight": torch.zeros(200, 47)}), "wrong shape"),
    "rows_differ": (lambda d, t: t.tensors.update({"lm_head.weight": torch.zeros(201, 48)}), "differ in shape"),
    "quantised": (lambda d, t: t.tensors.update({"lm_head.weight": torch.zeros(200, 48, dtype=torch.int8)}), "quantised"),
    "multimodal": (lambda d, t: t.config.update(text_config={"hidden_size": t.config.pop("hidden_size")}), "Multimodal"),
    "softcap": (lambda d, t: t.config.update(final_logit_softcapping=30.0), "final_logit_softcapping"),
    "a_drafter": (lambda d, t: t.config.update(architectures=["DSpineDraftModel"]), "is a drafter"),
    "depth_missing": (lambda d, t: t.config.pop("num_hidden_layers"), "num_hidden_layers"),
    "depth_not_a_number": (lambda d, t: t.config.update(num_hidden_layers="six"), "num_hidden_layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_misfits(case: str, drafter: Any, target: Any) -> None:
    edit, message = MISFITS[case]
    edit(drafter, target)
    with pytest.raises(CheckpointError) as error:
        check_pairing(open_checkpoint(drafter.write()), read_target(target.write()))
    assert message in str(error.value)
    assert error.value.exit_code == 3


def test_padded_rows_of_a_dflash_target(drafter: Any, target: Any) -> None:
    drafter.to_dflash().config.update(is_causal=False)
    _resize(target, 256)
    warnings = check_pairing(open_checkpoint(drafter.write()), read_target(target.write()))
    assert warnings == ["the target's lm_head is padded from 200 to 256 rows"]


def test_rows_without_a_token(drafter: Any, target: Any) -> None:
    path = target.write()
    tokenizer = {"model": {"vocab": {f"t{i}": i for i in range(190)}}, "added_tokens": [{"id": 192, "content": "<x>"}]}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    info = read_target(path)
    assert info.tokenizer_vocab == 193
    warnings = check_pairing(open_checkpoint(drafter.write()), info)
    assert len(warnings) == 1
    assert "193..199" in warnings[0]


@pytest.mark.parametrize("text", ["", "[]", '{"model": 3, "added_tokens": [1]}', '{"model": {"vocab": {"a": "b"}}}'])
def test_unreadable_tokenizers_do_not_matter(text: str, target: Any) -> None:
    path = target.write()
    (path / "tokenizer.json").write_text(text)
    assert read_target(path).tokenizer_vocab is None


def test_absent_target(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match="not found"):
        read_target(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="hidden_size"):
        read_target(tmp_path)


def test_extra_target_tensors_are_fine(target: Any) -> None:
    target.tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 4)
    path = target.write()
    save_file(target.tensors, path / "model.safetensors")
    assert read_target(path).vocab_size == 200
