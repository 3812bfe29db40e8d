"""Bad configurations: each is refused before anything is loaded, with a message that names the way out."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from .conftest import Configure, Edit


def refused(configure: Configure, options: dict[str, Any], *words: str, **arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        configure(options, **arguments)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in:\n{caught.value}"


# Engine arguments and speculative options beside method and model -> what the message must say.
ARGUMENTS = {
    "more tokens than the block": ({}, {"num_speculative_tokens": 8}, ["block_size 8", "1 to 7", "leave it out"]),
    "as many tokens as the block, by flag": ({"spec_tokens": 8}, {}, ["1 to 7"]),
    "no tokens": ({}, {"num_speculative_tokens": 0}, ["1 to 7"]),
    "beyond the rotary cache": (
        {"max_model_len": 1024, "hf_overrides": {"max_position_embeddings": 1024}},
        {},
        ["at most 512", "--max-model-len 512"],
    ),
    "pipeline parallel": ({"pipeline_parallel_size": 2}, {}, ["pipeline", "--tensor-parallel-size"]),
    "drafter on fewer ranks": (
        {"tensor_parallel_size": 2},
        {"draft_tensor_parallel_size": 1},
        ["draft_tensor_parallel_size 1", "leave draft_tensor_parallel_size out"],
    ),
    "ranks that do not divide the heads": ({"tensor_parallel_size": 3}, {}, ["4 heads", "--tensor-parallel-size"]),
    "fp8 cache": ({"kv_cache_dtype": "fp8"}, {}, ["fp8", "--kv-cache-dtype auto"]),
    "fp8 cache of the drafter": ({}, {"kv_cache_dtype": "fp8"}, ["fp8", "--kv-cache-dtype auto"]),
    "LoRA": ({"enable_lora": True}, {}, ["--enable-lora", "merge the adapter"]),
    "no room for a block": ({"max_num_batched_tokens": 8, "max_num_seqs": 1}, {}, ["--max-num-batched-tokens 8"]),
    "reduced candidates of DSpark": ({}, {"dspark_draft_topk": 4}, ["dspark_draft_topk", "leave"]),
    "adaptive verification": ({}, {"enable_adaptive_verification": True}, ["enable_adaptive_verification", "leave"]),
    "another format than float8": ({}, {"quantization": "mxfp8"}, ["mxfp8", "fp8_per_channel", "leave it out"]),
    "formats in a list": ({}, {"quantization": ["fp8"]}, ["['fp8']", "fp8_per_channel", "leave it out"]),
    "a format that is a dictionary": ({}, {"quantization": {"bits": 8}}, ["{'bits': 8}", "leave it out"]),
    "no format": ({}, {"quantization": ""}, ["quantization: ''", "leave it out"]),
    "float8 of a float32 drafter": ({}, {"quantization": "fp8"}, ["float32", "--dtype bfloat16", "leave quantization"]),
    "flag against dictionary": ({"spec_tokens": 3}, {"num_speculative_tokens": 4}, ["num_speculative_tokens"]),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case: str, pair: Any, configure: Configure) -> None:
    arguments, options, words = ARGUMENTS[case]
    refused(configure, {"method": "dspine", "model": str(pair.drafter), **options}, *words, **arguments)


DFLASH = {"mask_token_id": 319, "target_layer_ids": [0, 2]}
# Changes to the drafter's config.json -> what the message must say.
DRAFTERS = {
    "taps missing": ({"dflash_config": {"mask_token_id": 319}}, ["target_layer_ids"]),
    "taps that disagree by one": (
        {"eagle_aux_hidden_state_layer_ids": [0, 2]},
        ["aux_hidden_state_layer_ids = target_layer_ids + 1", "keep only"],
    ),
    "tap beyond the target": (
        {"dflash_config": {**DFLASH, "target_layer_ids": [0, 4]}, "num_target_layers": None},
        ["beyond the target's depth", "0 to 3"],
    ),
    "another depth": ({"num_target_layers": 36}, ["number of target layers", "36", "4"]),
    "anchor that predicts": ({"sample_from_anchor": True}, ["sample_from_anchor", "false"]),
    "bidirectional block": ({"is_causal": False}, ["is_causal", "causal"]),
    "another vocabulary": ({"vocab_size": 512}, ["vocabulary", "512", "320"]),
    "reduced vocabulary": ({"draft_vocab_size": 200}, ["Reduced draft vocabularies"]),
    "another hidden size": ({"hidden_size": 96}, ["hidden size", "96", "64"]),
    "mask outside the vocabulary": ({"dflash_config": {**DFLASH, "mask_token_id": 320}}, ["mask_token_id"]),
    "no block size": ({"block_size": None}, ["block_size"]),
    "attention bias": ({"attention_bias": True}, ["attention_bias"]),
    "unknown key": ({"mystery_gate": 3}, ["mystery_gate"]),
    "no DSpine": ({"architectures": ["DFlashDraftModel"], "dspine_config": None}, ["not a DSpine", "dflash"]),
    "some other model": ({"architectures": ["LlamaForCausalLM"], "dspine_config": None}, ["not a DSpine"]),
    "no transfer sizes": ({"dspine_config": {"top_k": 4}}, ["transfer_rank"]),
}


@pytest.mark.parametrize("case", DRAFTERS)
def test_drafters(case: str, pair: Any, configure: Configure, edited: Edit) -> None:
    changes, words = DRAFTERS[case]
    refused(configure, {"method": "dspine", "model": str(edited(pair.drafter, **changes))}, *words)


def test_no_drafter_there(configure: Configure, tmp_path: Any) -> None:
    refused(configure, {"method": "dspine", "model": str(tmp_path / "nothing")}, "cannot be read", "nothing")


def test_dspine_under_another_method(pair: Any, configure: Configure) -> None:
    refused(configure, {"method": "dflash", "model": "dspine"}, "another method", "dspine")


def test_codes_that_would_have_to_be_recomputed(pair: Any, configure: Configure, edited: Edit) -> None:
    drafter = edited(pair.drafter)
    tensors = load_file(drafter / "model.safetensors")
    del tensors["transfer_codes"]
    save_file(tensors, drafter / "model.safetensors")
    refused(configure, {"method": "dspine", "model": str(drafter)}, "transfer_codes", "build", "--target vllm")


def test_multimodal_target(pair: Any, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import ModelConfig

    monkeypatch.setattr(ModelConfig, "is_multimodal_model", property(lambda self: True))
    refused(configure, {"method": "dspine", "model": str(pair.drafter)}, "multimodal", "text-only")


def test_model_runner_v1(pair: Any, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    options = {"method": "dspine", "model": str(pair.drafter)}
    refused(configure, options, "Model Runner V2", "unset VLLM_USE_V2_MODEL_RUNNER")


def test_a_model_class_that_cannot_be_loaded(pair: Any, configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.models import ModelRegistry

    registered = dict(ModelRegistry.models)
    del registered["DSpineDraftModel"]
    monkeypatch.setattr(ModelRegistry, "models", registered)
    refused(configure, {"method": "dspine", "model": str(pair.drafter)}, "Qwen3DSparkModel", "DSpineDraftModel")
