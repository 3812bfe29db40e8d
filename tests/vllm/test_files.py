"""``build --target vllm``: what lies in the bundle, and that vLLM configures itself from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspine_export.bundle import Bundle, open_bundle
from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.checkpoint.parse_config import parse_config
from dspine_export.errors import DspineError, UsageError
from dspine_export.model.token_table import fold_token_table
from dspine_export.pipeline.build import build, plan, resume
from dspine_export.pipeline.progress import Silent
from dspine_export.pipeline.request import BuildRequest
from dspine_export.pipeline.verify import verify_bundle
from dspine_export.recipes import Recipe, apply_overrides
from dspine_export.runtime.open_executor import open_executor
from dspine_export.vllm.drafter_lookup import read_registry

from .conftest import BLOCK_SIZE, Configure, Edit


def recipe(*assignments: str, dtype: str = "float32") -> Recipe:
    return apply_overrides(Recipe(), assignments, target="vllm", dtype=dtype)


def request_for(pair: Any, output: Path, *assignments: str, drafter: Path | None = None, **more: Any) -> BuildRequest:
    return BuildRequest(drafter or pair.drafter, pair.target, output, recipe(*assignments), **more)


@pytest.fixture(scope="session")
def bundle(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return build(request_for(pair, tmp_path_factory.mktemp("bundle") / "out"), Silent())


def test_files_are_listed_and_intact(bundle: Bundle) -> None:
    opened = open_bundle(bundle.path, check_hashes=True)
    names = {entry.path for entry in opened.manifest.files}
    assert {"vllm/config.json", "vllm/model.safetensors", "drafter/config.json"} <= names
    assert not any(name.startswith(("onnx/", "portable/", "engines/")) for name in names)
    assert opened.manifest.stage_names == ("drafter", "vllm")


def test_tensors_are_the_checkpoints_and_the_folded_table(pair: Any, bundle: Bundle) -> None:
    written, stored = load_file(bundle.file("vllm/model.safetensors")), load_file(pair.drafter / "model.safetensors")
    table = written.pop("injection.token_table")
    folded = fold_token_table(
        stored.pop("transfer_codes"),
        stored["injection.message.weight"],
        stored["injection.predecessor_gate.weight"],
    )
    torch.testing.assert_close(table, folded)
    del stored["transfer_ready"]
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[name], stored[name]) for name in stored)


def test_config_carries_the_keys_of_every_version(pair: Any, bundle: Bundle) -> None:
    document = json.loads(bundle.file("vllm/config.json").read_text())
    assert document["architectures"] == ["DSpineDraftModel", "Qwen3DSparkModel"]
    assert (document["sample_from_anchor"], document["dspark_bonus_anchor"], document["is_causal"]) == (
        False,
        True,
        True,
    )
    assert document["dflash_config"] == {"mask_token_id": 319, "target_layer_ids": [0, 2], "causal": True}
    assert document["eagle_aux_hidden_state_layer_ids"] == [1, 3]
    assert document["speculators_config"]["verifier"]["name_or_path"] == str(pair.target)
    own = open_checkpoint(pair.drafter).config
    read = parse_config(document, "config.json", {}, False, [])
    assert read == own


def test_half_precision(pair: Any, tmp_path: Path) -> None:
    made = build(BuildRequest(pair.drafter, pair.target, tmp_path / "out", recipe(dtype="bfloat16")), Silent())
    assert {tensor.dtype for tensor in load_file(made.file("vllm/model.safetensors")).values()} == {torch.bfloat16}
    assert json.loads(made.file("vllm/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("inside", ["", "vllm"], ids=["bundle", "directory"])
def test_named_as_drafter(inside: str, bundle: Bundle, configure: Configure) -> None:
    made = configure({"method": "dspine", "model": str(bundle.path / inside)}).speculative_config
    assert made.draft_model_config.model == str(bundle.path / "vllm")
    assert made.draft_model_config._architecture == "DSpineDraftModel"
    hf_config = made.draft_model_config.hf_config
    assert hf_config.rope_parameters["rope_theta"] == 10000.0 and hf_config.head_dim == 32
    assert hf_config.dspine_config == {"transfer_rank": 32, "message_size": 16, "top_k": 8}


@pytest.mark.parametrize("inside", ["", "vllm"], ids=["bundle", "directory"])
def test_served_as_the_model(inside: str, pair: Any, bundle: Bundle, configure: Configure) -> None:
    """``vllm serve OUT``: the target is the verifier it names, after a move of the bundle as well."""
    moved = shutil.copytree(bundle.path, bundle.path.with_name("moved"), dirs_exist_ok=True)
    config = configure(None, model=str(moved / inside))
    assert config.model_config.model == str(pair.target)
    speculative = config.speculative_config
    assert (speculative.method, speculative.num_speculative_tokens) == ("dspark", BLOCK_SIZE - 1)
    assert speculative.draft_model_config.model == str(moved / "vllm")
    shorter = configure({"num_speculative_tokens": 3}, model=str(moved / inside)).speculative_config
    assert shorter.num_speculative_tokens == 3


def test_served_target_that_is_gone(bundle: Bundle, configure: Configure, tmp_path: Path) -> None:
    moved = shutil.copytree(bundle.path, tmp_path / "moved")
    document = json.loads((moved / "vllm" / "config.json").read_text())
    document["speculators_config"]["verifier"]["name_or_path"] = "/elsewhere/target"
    (moved / "vllm" / "config.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"(?s)not on this machine.*/elsewhere/target.*vllm serve TARGET"):
        configure(None, model=str(moved))


def test_served_with_remote_code(bundle: Bundle, configure: Configure) -> None:
    with pytest.raises(ValueError, match="--trust-remote-code"):
        configure(None, model=str(bundle.path), trust_remote_code=True)


def test_registered(pair: Any, tmp_path: Path, configure: Configure) -> None:
    output = tmp_path / "out"
    build(request_for(pair, output, "vllm.register_drafter=true"), Silent())
    assert read_registry() == {str(pair.target): str(output / "vllm")}
    made = configure({"model": "dspine"}).speculative_config
    assert made.draft_model_config.model == str(output / "vllm")


def test_named_target(pair: Any, tmp_path: Path) -> None:
    made = build(
        request_for(pair, tmp_path / "out", "vllm.target=Qwen/Qwen3-8B", "vllm.register_drafter=true"), Silent()
    )
    document = json.loads(made.file("vllm/config.json").read_text())
    assert document["speculators_config"]["verifier"]["name_or_path"] == "Qwen/Qwen3-8B"
    assert read_registry() == {"Qwen/Qwen3-8B": str(tmp_path / "out" / "vllm")}


def refused(call: Any, *words: str) -> None:
    with pytest.raises(DspineError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_dflash_is_refused(pair: Any, tmp_path: Path, edited: Edit) -> None:
    drafter = edited(pair.drafter, architectures=["DFlashDraftModel"], dspine_config=None)
    names = ("injection.", "transfer_")
    tensors = {
        name: value for name, value in load_file(drafter / "model.safetensors").items() if not name.startswith(names)
    }
    save_file(tensors, drafter / "model.safetensors")
    call = lambda: plan(request_for(pair, tmp_path / "out", drafter=drafter), Silent())  # noqa: E731
    refused(call, "DFlashDraftModel", '"method": "dflash"')


@pytest.mark.parametrize("more", [{"stop_after_onnx": True}, {"triton": True}])
def test_options_of_other_targets_are_refused(more: dict[str, bool], pair: Any, tmp_path: Path) -> None:
    refused(lambda: plan(request_for(pair, tmp_path / "out", **more), Silent()), "no graphs", "--target trtllm")


def test_there_is_nothing_to_verify_or_resume(pair: Any, bundle: Bundle) -> None:
    refused(lambda: verify_bundle(bundle, pair.target, Silent()), "no graphs", "--target onnx")
    refused(lambda: resume(bundle.path, None, None, Silent()), "no graphs")
    unused = torch.empty(0)
    for name in ("onnxruntime", "tensorrt"):
        refused(lambda name=name: open_executor(name, bundle.path, unused, unused), "no graphs", "--executor torch")


def test_damaged_file_of_drafters(pair: Any, tmp_path: Path) -> None:
    (tmp_path / "drafters.yaml").write_text("- a list\n")
    with pytest.raises(UsageError, match="TARGET: DRAFTER"):
        plan(request_for(pair, tmp_path / "out", "vllm.register_drafter=true"), Silent())
