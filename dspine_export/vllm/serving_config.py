"""A drafter's configuration in the keys that every supported vLLM reads.

* Layout: 0.32 and 0.33 read ``sample_from_anchor``, 0.26 reads ``dspark_bonus_anchor``. DSpine fills in: the anchor predicts nothing, its
  block is 1 + K rows. A missing key means K rows, and next to nothing is accepted.
* Taps: ``dflash_config.target_layer_ids`` and ``target_layer_ids`` count layers from 0, ``eagle_aux_hidden_state_layer_ids`` from the
  embedding. Where vLLM finds none it takes layers of its own choice.
* Mask: ``is_causal`` is asked first, then ``dflash_config.causal``.
* Architecture: vLLM loads the first one it can; its own tests for a DSpark drafter see the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspine_export.checkpoint.config import DrafterConfig

METHOD = "dspine"
HOST_METHOD = "dspark"
ARCHITECTURE = "DSpineDraftModel"
HOST_ARCHITECTURE = "Qwen3DSparkModel"


def serving_keys(config: DrafterConfig) -> dict[str, Any]:
    """The keys through which vLLM learns that a drafter is DSpine, JSON-ready. ``config`` is a DSpine drafter's."""
    assert config.transfer is not None
    taps = list(config.target_layer_ids)
    return {
        "architectures": [ARCHITECTURE, HOST_ARCHITECTURE],
        "is_causal": True,
        "sample_from_anchor": False,
        "dspark_bonus_anchor": True,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": taps,
        "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in taps],
        "target_hidden_size": config.hidden_size,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": taps, "causal": True},
        "dspine_config": {
            "transfer_rank": config.transfer.rank,
            "message_size": config.transfer.message_size,
            "top_k": config.transfer.top_k,
        },
    }


def layer_keys(config: DrafterConfig) -> dict[str, Any]:
    """The backbone's configuration as Qwen3's, JSON-ready."""
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        **({} if config.num_target_layers is None else {"num_target_layers": config.num_target_layers}),
    }


def drafter_document(config: DrafterConfig, dtype: str, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` of a drafter directory that vLLM serves as it is, JSON-ready.

    It is read as a Qwen3 configuration by 0.26 and by this package, and as speculators' format by vLLM, which then serves the verifier
    with this drafter: ``vllm serve DIRECTORY``.

    Args:
        dtype: of the stored weights. verifier: ``name_or_path`` and ``architectures`` of the target.
    """
    layers = layer_keys(config)
    return {
        **layers,
        **serving_keys(config),
        "dtype": dtype,
        "transformer_layer_config": layers,
        "speculators_model_type": METHOD,
        "speculators_config": {
            "algorithm": METHOD,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "verifier": dict(verifier),
        },
    }


def apply_keys(keys: Mapping[str, Any], hf_config: Any) -> Any:
    """Set ``keys`` on a configuration that vLLM parsed; sections keep what else is in them.

    Handed to vLLM as a partial of this function, which it can send to its other processes.
    """
    for key, value in keys.items():
        old = getattr(hf_config, key, None)
        setattr(hf_config, key, {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value)
    return hf_config


def speculators_config(config_dict: dict[str, Any], pre_trained_config: dict[str, Any]) -> None:
    """vLLM's updater for ``speculators_model_type: dspine``: what lies beside ``transformer_layer_config`` joins it."""
    apart = {"transformer_layer_config", "speculators_config", "speculators_model_type", "model_type", "dtype"}
    for key, value in config_dict.items():
        if key not in apart:
            pre_trained_config.setdefault(key, value)
    for key in ("architectures", "dflash_config", "dspine_config"):
        pre_trained_config[key] = config_dict[key]
