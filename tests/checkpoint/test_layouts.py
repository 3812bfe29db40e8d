"""The accepted layouts (a) to (d), and how they are told apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dspine_export.checkpoint.config import CANONICAL_TRANSFER_BASIS
from dspine_export.checkpoint.load import check_finite, open_checkpoint
from dspine_export.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"
ZLAB = {"AutoModel": "dflash.DFlashDraftModel"}


@pytest.mark.parametrize("case", ["b8_gqa", "b16_qwen_ratio", "b4_mha_k1"])
def test_golden_checkpoints_open(case: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / case / "drafter")
    check_finite(checkpoint)
    config = checkpoint.config
    assert (config.layout, config.architecture, config.is_causal) == ("specforge", "DSpineDraftModel", True)
    assert checkpoint.codes is not None
    assert checkpoint.codes.shape == (config.vocab_size, config.transfer.rank)
    assert checkpoint.tensors.read("fc.weight").shape == (config.hidden_size, config.num_taps * config.hidden_size)
    assert checkpoint.warnings == ()


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("architectures", [["DSpineDraftModel"], ["DFlashDraftModel"], None])
def test_reference_layout(nested: bool, architectures: list[str] | None, drafter: Any) -> None:
    codes = drafter.tensors["transfer_codes"].clone()
    drafter.to_reference()
    drafter.config.update(block_size=4, architectures=architectures)
    if nested:
        drafter.config = {"config": drafter.config, "steps": 1000, "args": {"lr": 1e-4}}
    checkpoint = open_checkpoint(drafter.write())
    config = checkpoint.config
    assert (config.layout, config.block_size, config.is_causal) == ("reference", 16, True)
    assert (config.transfer.rank, config.transfer.message_size, config.transfer.top_k) == (16, 8, 16)
    assert torch.equal(checkpoint.tensors.read("transfer_codes"), codes)
    assert any("block_size 4 ignored" in warning for warning in checkpoint.warnings)


def test_reference_layout_refusals(drafter: Any) -> None:
    path = drafter.to_reference().write()
    save_file({"code": torch.zeros(200, 16)}, path / "transfer.safetensors")
    with pytest.raises(CheckpointError, match="codes file"):
        open_checkpoint(path)
    save_file({"codes": torch.zeros(199, 16)}, path / "transfer.safetensors")
    with pytest.raises(CheckpointError, match="transfer_codes has the wrong shape"):
        open_checkpoint(path)
    (path / "transfer.safetensors").unlink()
    with pytest.raises(CheckpointError, match="may not be recomputed"):
        open_checkpoint(path)


def test_stored_codes_win_over_a_codes_file(drafter: Any) -> None:
    path = drafter.write()
    save_file({"codes": torch.zeros(200, 16)}, path / "transfer.safetensors")
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.tensors.read("transfer_codes"), drafter.tensors["transfer_codes"])
    assert len(checkpoint.warnings) == 1


# name: (edits of a silent DFlash config, expected is_causal or the refusal)
MASKS = {
    "zlab": ({"auto_map": ZLAB}, False),
    "zlab_with_explicit_flag": ({"auto_map": ZLAB, "is_causal": True}, True),
    "flag_true": ({"is_causal": True}, True),
    "flag_false": ({"is_causal": False}, False),
    "modelopt_causal": ({"dflash": {"causal": True, "projector_type": None}}, True),
    "modelopt_bidirectional": ({"dflash": {"causal": False, "projector_type": "dflash"}}, False),
    "flag_wins": ({"is_causal": True, "dflash": {"causal": False}}, True),
    "silent": ({}, "mask is undetermined"),
    "null": ({"is_causal": None}, "mask is undetermined"),
    "zlab_sliding": (
        {"auto_map": ZLAB, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
        "mask is undetermined",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MASKS)
def test_dflash_masks(case: str, drafter: Any) -> None:
    edits, expected = MASKS[case]
    drafter.to_dflash()
    drafter.dflash.update(edits.get("dflash", {}))
    drafter.config.update({key: value for key, value in edits.items() if key != "dflash"})
    path = drafter.write()
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            open_checkpoint(path)
        return
    config = open_checkpoint(path).config
    assert (config.layout, config.is_causal, config.transfer, config.is_dspine) == ("dflash", expected, None, False)


def test_zlab_block_size_inside_dflash_config(drafter: Any) -> None:
    drafter.to_dflash().config.update(auto_map=ZLAB)
    drafter.dflash["block_size"] = drafter.config.pop("block_size")
    assert open_checkpoint(drafter.write()).config.block_size == 4


def test_modelopt_sliding(drafter: Any) -> None:
    drafter.to_dflash().config.update(sliding_window=8)
    drafter.dflash.update(causal=True, use_swa=True, swa_window_size=8)
    config = open_checkpoint(drafter.write()).config
    assert [config.attention_window(layer) for layer in range(2)] == [8, 8]


def test_speculators_style(drafter: Any) -> None:
    drafter.to_dflash()
    outer = ("architectures", "block_size", "num_target_layers")
    section = drafter.config.pop("dflash_config")
    layers = {key: value for key, value in drafter.config.items() if key not in outer}
    drafter.config = {key: drafter.config[key] for key in outer} | {
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": layers | {"architectures": ["Qwen3ForCausalLM"]},
        "aux_hidden_state_layer_ids": [3],
        "mask_token_id": section["mask_token_id"],
        "is_causal": False,
    }
    config = open_checkpoint(drafter.write()).config
    assert config.target_layer_ids == (2,)
    assert not config.is_causal


def test_speculators_tap_on_the_embedding_is_refused(drafter: Any) -> None:
    drafter.to_dflash().config.update(is_causal=True, aux_hidden_state_layer_ids=[0])
    del drafter.dflash["target_layer_ids"]
    with pytest.raises(CheckpointError, match="target_layer_ids"):
        open_checkpoint(drafter.write())


def test_dflash_does_not_pass_as_dspine(drafter: Any) -> None:
    drafter.to_dflash().config.update(architectures=["DSpineDraftModel"], is_causal=True)
    with pytest.raises(CheckpointError, match="without dspine_config"):
        open_checkpoint(drafter.write())


def _declare(drafter: Any, basis: str | None = CANONICAL_TRANSFER_BASIS, rows: int = 32, width: int = 8) -> None:
    ids = list(range(0, rows * 3, 3))
    components = drafter.tensors.pop("transfer_codes")[ids, :width].tolist()
    drafter.dspine.update(transfer_basis=basis, transfer_probe={"token_ids": ids, "components": components})


def test_absent_codes_with_a_declaration(drafter: Any) -> None:
    _declare(drafter)
    del drafter.tensors["transfer_ready"]
    checkpoint = open_checkpoint(drafter.write())
    assert checkpoint.codes is None
    transfer = checkpoint.config.transfer
    assert transfer.basis == CANONICAL_TRANSFER_BASIS
    assert len(transfer.probe.token_ids) == len(transfer.probe.components) == 32


@pytest.mark.parametrize("missing", ["transfer_basis", "transfer_probe"])
def test_absent_codes_without_a_declaration(missing: str, drafter: Any) -> None:
    _declare(drafter)
    del drafter.dspine[missing]
    with pytest.raises(CheckpointError, match="may not be recomputed"):
        open_checkpoint(drafter.write())


def test_absent_codes_in_an_unknown_basis(drafter: Any) -> None:
    _declare(drafter, basis="svd-float32")
    with pytest.raises(CheckpointError, match="may not be recomputed"):
        open_checkpoint(drafter.write())


@pytest.mark.parametrize("probe", [{"rows": 31}, {"width": 7}, {"rows": 0}])
def test_bad_probes(probe: dict[str, int], drafter: Any) -> None:
    _declare(drafter, **probe)
    with pytest.raises(CheckpointError, match="transfer_probe"):
        open_checkpoint(drafter.write())


def test_reference_config_written_as_json_file(drafter: Any) -> None:
    path = drafter.to_reference().write()
    (path / "config.json").write_text(json.dumps({"config": [1, 2]}))
    with pytest.raises(CheckpointError):
        open_checkpoint(path)
