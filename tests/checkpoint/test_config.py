"""Configuration: what is refused by name, and what is tolerated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.errors import CheckpointError

Config = dict[str, Any]


def top(**values: Any) -> Callable[[Config], None]:
    return lambda config: config.update(values)


def dflash(**values: Any) -> Callable[[Config], None]:
    return lambda config: config["dflash_config"].update(values)


def dspine(**values: Any) -> Callable[[Config], None]:
    return lambda config: config["dspine_config"].update(values)


def without(key: str, section: str | None = None) -> Callable[[Config], None]:
    return lambda config: (config[section] if section else config).pop(key)


def both(*edits: Callable[[Config], None]) -> Callable[[Config], None]:
    def apply(config: Config) -> None:
        for edit in edits:
            edit(config)

    return apply


# name: (edit of a valid DSpine config, what the message must say)
REFUSED = {
    "misspelt_architecture": (top(architectures=["DSpineDraftModle"]), "did you mean 'DSpineDraftModel'"),
    "lowercase_architecture": (top(architectures=["dspine_draft_model"]), "did you mean 'DSpineDraftModel'"),
    "unknown_architecture": (top(architectures=["LlamaForCausalLM"]), "Unknown drafter architecture"),
    "dspark": (top(architectures=["Qwen3DSparkModel"]), "DSpark uses shifted slots"),
    "dflash2": (top(architectures=["DFlash2DraftModel"]), "convolutions"),
    "no_architecture": (without("architectures"), "architectures"),
    "architecture_not_a_list": (top(architectures="DSpineDraftModel"), "architectures"),
    "dflash_with_dspine_config": (top(architectures=["DFlashDraftModel"]), "dspine_config"),
    "not_causal": (top(is_causal=False), "bidirectional"),
    "not_causal_nested": (both(without("is_causal"), dflash(causal=False)), "bidirectional"),
    "is_causal_not_bool": (top(is_causal="yes"), "is_causal"),
    "block_size_one": (top(block_size=1), "block_size"),
    "block_size_zero": (top(block_size=0), "block_size"),
    "block_size_negative": (top(block_size=-4), "block_size"),
    "block_size_huge": (top(block_size=10**9), "block_size"),
    "block_size_missing": (without("block_size"), "block_size"),
    "block_size_twice": (dflash(block_size=8), "disagree"),
    "top_k_above_vocabulary": (dspine(top_k=201), "top_k exceeds"),
    "top_k_zero": (dspine(top_k=0), "top_k"),
    "rank_above_hidden": (dspine(transfer_rank=49), "transfer_rank"),
    "rank_missing": (without("transfer_rank", "dspine_config"), "transfer_rank"),
    "rank_is_float": (dspine(transfer_rank=16.5), "transfer_rank"),
    "aliases_disagree": (dspine(transfer_dim=32), "disagree"),
    "tap_out_of_range": (dflash(target_layer_ids=[6]), "target_layer_ids"),
    "tap_negative": (dflash(target_layer_ids=[-1]), "target_layer_ids"),
    "tap_duplicated": (dflash(target_layer_ids=[2, 2]), "target_layer_ids"),
    "taps_empty": (dflash(target_layer_ids=[]), "target_layer_ids"),
    "taps_missing": (without("target_layer_ids", "dflash_config"), "target_layer_ids"),
    "taps_as_strings": (dflash(target_layer_ids=["2"]), "target_layer_ids"),
    "tap_off_by_one": (top(aux_hidden_state_layer_ids=[2]), "disagree"),
    "tap_off_by_one_other_spelling": (top(eagle_aux_hidden_state_layer_ids=[4]), "disagree"),
    "mask_outside_vocabulary": (dflash(mask_token_id=200), "mask_token_id"),
    "mask_negative": (dflash(mask_token_id=-1), "mask_token_id"),
    "mask_missing": (without("mask_token_id", "dflash_config"), "mask_token_id"),
    "mask_twice": (top(mask_token_id=3), "disagree"),
    "projector_type": (dflash(projector_type="domino"), "projector type 'domino'"),
    "markov_rank": (dflash(markov_rank=256), "markov_rank"),
    "top_level_markov_rank": (top(markov_rank=256), "markov_rank"),
    "attention_sink": (dflash(attention_sink_bias=True), "attention_sink_bias"),
    "shifted_labels": (dflash(shift_label=True), "shift_label"),
    "shifted_slots": (top(sample_from_anchor=True), "sample_from_anchor"),
    "mla": (dflash(attention_mode="mla"), "attention_mode"),
    "gate_kind": (dspine(gate_activation="tanh"), "gate_activation"),
    "readout_norm": (dspine(readout_norm="rms"), "readout_norm"),
    "logit_scale": (top(logit_scale=0.5), "logit_scale"),
    "quantised": (top(quantization_config={"bits": 4}), "quantization_config"),
    "misspelt_key": (top(slidng_window=4), "did you mean 'sliding_window'"),
    "attention_bias": (top(attention_bias=True), "attention_bias"),
    "activation": (top(hidden_act="gelu"), "hidden_act"),
    "model_type": (top(model_type="qwen3_moe"), "model_type"),
    "yarn": (top(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),
    "linear_old_spelling": (top(rope_scaling={"type": "linear", "factor": 2.0}), "linear"),
    "llama3_in_rope_parameters": (top(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "llama3"),
    "mrope": (top(rope_scaling={"mrope_section": [1, 2]}), "mrope_section"),
    "partial_rope": (top(partial_rotary_factor=0.5), "rotate-half"),
    "rope_theta_missing": (without("rope_theta"), "rope_theta"),
    "rope_theta_twice": (top(rope_parameters={"rope_theta": 5e5}), "rope_theta"),
    "rope_theta_negative": (top(rope_theta=-1.0), "rope_theta"),
    "eps_zero": (top(rms_norm_eps=0.0), "rms_norm_eps"),
    "eps_infinite": (top(rms_norm_eps=float("1e999")), "JSON"),
    "layer_types_short": (top(layer_types=["full_attention"]), "layer_types"),
    "layer_type_unknown": (top(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
    "sliding_without_window": (top(layer_types=["sliding_attention", "full_attention"]), "window"),
    "sliding_without_types": (both(without("layer_types"), top(use_sliding_window=True)), "layer_types"),
    "window_zero": (top(sliding_window=0), "sliding_window"),
    "heads_do_not_divide": (top(num_key_value_heads=2), "divide"),
    "head_dim_odd": (top(head_dim=15), "head_dim"),
    "hidden_size_missing": (without("hidden_size"), "hidden_size"),
    "hidden_size_bool": (top(hidden_size=True), "hidden_size"),
    "layers_absurd": (top(num_hidden_layers=10**9), "num_hidden_layers"),
    "draft_vocabulary": (top(draft_vocab_size=100), "vocabular"),
    "dflash_config_not_object": (top(dflash_config=[1]), "dflash_config"),
    "dspine_config_not_object": (top(dspine_config="r=16"), "dspine_config"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, drafter: Any) -> None:
    edit, message = REFUSED[case]
    edit(drafter.config)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(drafter.write())
    assert message in str(error.value)
    assert "config.json" in str(error.value)
    assert error.value.exit_code == 3


HARMLESS = {
    "transformers": top(
        transformers_version="4.57.1", auto_map={"AutoModel": "dspine.DSpineDraftModel"}, use_cache=True, bos_token_id=1,
        eos_token_id=[2, 3], initializer_range=0.02, id2label={"0": "L"}, _attn_implementation_internal="sdpa",
    ),
    "training": both(
        dspine(ce_weight=0.1, alignment_weight=0.5, alignment_warmup_steps=146, replacement_layers=3, replacement_hold_ratio=0.2,
               candidate_mass_threshold=1e-4, replacement_probability=0.5),
        dflash(loss_decay_gamma=7, num_anchors=512), top(train_seed=3),
    ),
    "two_architectures": top(architectures=["DSpineDraftModel", "Qwen3DSparkModel"], sample_from_anchor=False),
    "switched_off": both(top(markov_rank=0, attention_sink_bias=False, quantization_config=None), dflash(shift_label=False)),
    "default_rope": both(without("rope_theta"), top(rope_parameters={"rope_type": "default", "rope_theta": 10000})),
    "rope_scaling_default": top(rope_scaling={"rope_type": "default"}),
    "same_taps_counted_from_embedding": top(aux_hidden_state_layer_ids=[3]),
    "projector_named_dspine": dflash(projector_type="dspine"),
    "mask_unstated": without("is_causal"),
    "no_depth": without("num_target_layers"),
    "integer_theta": top(rope_theta=10000),
}  # fmt: skip


@pytest.mark.parametrize("case", HARMLESS)
def test_tolerated(case: str, drafter: Any) -> None:
    HARMLESS[case](drafter.config)
    config = open_checkpoint(drafter.write()).config
    assert config.is_causal
    assert config.rope_theta == 10000.0
    assert config.target_layer_ids == (2,)


def test_training_keys_are_kept(drafter: Any) -> None:
    drafter.dspine["alignment_weight"] = 0.5
    transfer = open_checkpoint(drafter.write()).config.transfer
    assert transfer is not None
    assert transfer.extra == {"alignment_weight": 0.5}


def test_size_aliases(drafter: Any) -> None:
    drafter.config["dspine_config"] = {"transfer_dim": 16, "message_dim": 8, "top_k": 1}
    transfer = open_checkpoint(drafter.write()).config.transfer
    assert (transfer.rank, transfer.message_size) == (16, 8)


def test_is_causal_wins_with_a_warning(drafter: Any) -> None:
    drafter.dflash["causal"] = False
    checkpoint = open_checkpoint(drafter.write())
    assert checkpoint.config.is_causal
    assert any("overrides" in warning for warning in checkpoint.warnings)


def test_sliding_layers(drafter: Any) -> None:
    drafter.config.update(layer_types=["sliding_attention", "full_attention"], sliding_window=4)
    config = open_checkpoint(drafter.write()).config
    assert [config.attention_window(layer) for layer in range(2)] == [4, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "JSON"),
        ("[]", "not an object"),
        ('{"hidden_size": 1, "hidden_size": 2}', "twice"),
        ('{"rms_norm_eps": NaN}', "JSON"),
        ("[" * 10**5, "nested"),
        ('{"a": "\\ud800"}', "configuration key"),
    ],
)
def test_bad_json(text: str, message: str, drafter: Any) -> None:
    (drafter.write() / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(drafter.path)
    assert message in str(error.value)


def test_config_missing_and_oversized(drafter: Any) -> None:
    file = drafter.write() / "config.json"
    file.unlink()
    with pytest.raises(CheckpointError, match="not found"):
        open_checkpoint(drafter.path)
    file.write_text(json.dumps({"pad": "x" * (16 << 20)}))
    with pytest.raises(CheckpointError, match="too large"):
        open_checkpoint(drafter.path)


_KEYS = [
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "head_dim", "vocab_size", "rms_norm_eps", "hidden_act", "rope_theta",
    "rope_scaling", "rope_parameters", "is_causal", "block_size", "num_target_layers", "layer_types", "sliding_window", "auto_map", "dtype",
    "dflash_config", "dspine_config", "aux_hidden_state_layer_ids", "transformer_layer_config", "config", "surprise",
    "dflash_config.mask_token_id", "dflash_config.target_layer_ids", "dflash_config.use_swa", "dflash_config.projector_type",
    "dspine_config.transfer_rank", "dspine_config.transfer_dim", "dspine_config.top_k", "dspine_config.transfer_probe",
]  # fmt: skip
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "rope_theta", "x"]), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.dictionaries(st.sampled_from(_KEYS), _JSON, min_size=1, max_size=3))
def test_odd_values_never_raise_anything_else(edits: Config, drafter: Any) -> None:
    config = json.loads(json.dumps(drafter.config))
    for key, value in edits.items():
        section, _, name = key.rpartition(".")
        place = config[section] if section and isinstance(config.get(section), dict) else config
        place[name] = value
    if not drafter.path.exists():
        drafter.write()
    (drafter.path / "config.json").write_text(json.dumps(config))
    try:
        open_checkpoint(drafter.path)
    except CheckpointError as error:
        str(error).encode()
