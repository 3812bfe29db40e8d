"""The signature snapshots of the 1.3.0 and 1.4.0 pre-releases.

The lines differ in the options of ``DSparkDecodingConfig`` and in how the block's width is asked for. A commit names one revision of the
main branch at which the file has the content that was read; main carries both pre-release lines in turn, so no file is bound to one tag,
and the documentation page of each release is named as the source of what is specific to it.
"""

from __future__ import annotations

from dspine_export.trtllm.signatures import Hook, Snapshot, Source

_REPOSITORY = "NVIDIA/TensorRT-LLM"
_SPECULATIVE, _MODELS = "tensorrt_llm/_torch/speculative", "tensorrt_llm/_torch/models"
_EARLIER, _LATER = "009d8fa431bd3de92245aab80f8b57dc70da1ac4", "00679c66c3e38f6d2651ad0a5bef0f94d862e36c"
_DFLASH = Source(_REPOSITORY, f"{_SPECULATIVE}/dflash.py", _LATER)
_DSPARK_WORKER = Source(_REPOSITORY, f"{_SPECULATIVE}/dspark.py", _EARLIER)
_MODEL = Source(_REPOSITORY, f"{_MODELS}/modeling_dflash.py", _EARLIER)
_DSPARK_MODEL = Source(_REPOSITORY, f"{_MODELS}/modeling_dspark.py", _EARLIER)
# Read without a commit at hand: the change that introduced them is named instead.
_REGISTRY = Source(_REPOSITORY, f"{_MODELS}/modeling_utils.py (pull request 18043)")
_MODES = Source(_REPOSITORY, f"{_SPECULATIVE}/interface.py (pull request 15808)")
_OPTIONS = Source(_REPOSITORY, "tensorrt_llm/llmapi/llm_args.py", "0004396720054fd8e205cbf616f21f0b57c6b412")
_PAGES = {
    release: Source("nvidia.github.io/TensorRT-LLM", f"{release}/llm-api/reference/DSparkDecodingConfig.html")
    for release in ("1.3.0rc27", "1.4.0rc1")
}

_WORKER = "_torch.speculative.dflash:DFlashWorker"
_METADATA = "_torch.speculative.dflash:DFlashSpecMetadata"
_STANDALONE = "_torch.speculative.dspark:DSparkWorker"
_DRAFT = "_torch.models.modeling_dflash:DFlashForCausalLM"
_HEAD = "_torch.models.modeling_dspark:GQADSparkForCausalLM"

_COMMON = (
    Hook(
        "_torch.speculative.interface:SpeculativeDecodingMode.DSPARK",
        "SpeculativeDecodingMode.DSPARK",
        _MODES,
        "member",
        "called",
    ),
    Hook("_torch.models.modeling_utils:register_draft_model", "(mode)", _REGISTRY, side="called"),
    Hook("_torch.models.modeling_utils:get_registered_draft_model_builder", "(mode)", _REGISTRY, side="called"),
    Hook(
        f"{_METADATA}.maybe_capture_hidden_states",
        "(self, layer_id, hidden_states, residual=None)",
        _DFLASH,
        side="called",
    ),
    Hook(f"{_METADATA}.get_hidden_states", "(self, num_tokens)", _DFLASH, side="called"),
    Hook(
        f"{_WORKER}.__init__", "(self, spec_config, mapping, use_separate_draft_kv_cache=False)", _DFLASH, side="called"
    ),
    Hook(
        f"{_WORKER}._lazy_init_ctx_buffers",
        "(self, draft_model, spec_metadata, attn_metadata, draft_kv_cache_manager=None)",
        _DFLASH,
        side="called",
    ),
    Hook(
        f"{_WORKER}._store_prefill_context",
        "(self, draft_model, spec_metadata, attn_metadata, position_ids, total_target_tokens)",
        _DFLASH,
        side="called",
    ),
    Hook(
        f"{_WORKER}._forward_impl",
        "(self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata, draft_model, resource_manager=None)",
        _DFLASH,
        side="called",
    ),
    Hook(
        f"{_WORKER}.prepare_1st_drafter_inputs",
        "(self, input_ids, position_ids, hidden_states, accepted_tokens, num_accepted_tokens, attn_metadata, spec_metadata, "
        "draft_model, total_target_tokens=0)",
        _DFLASH,
        side="called",
    ),
    Hook(
        f"{_STANDALONE}._draft_slot_ids",
        "(self, draft_model, num_gens, block_size, num_draft_tokens)",
        _DSPARK_WORKER,
        side="called",
    ),
    Hook(
        f"{_STANDALONE}._refine_block_logits",
        "(self, draft_model, gen_logits, inputs, spec_metadata)",
        _DSPARK_WORKER,
        side="called",
    ),
    Hook(
        f"{_DRAFT}.dflash_forward",
        "(self, noise_embedding, query_positions, num_ctx_per_req, ctx_k_cache, ctx_v_cache, ctx_cache_batch_idx, ctx_kv_cache=None, "
        "ctx_page_table=None)",
        _MODEL,
    ),
    Hook(f"{_DRAFT}.precompute_context_kv", "(self, projected_hidden, positions)", _MODEL),
    Hook(f"{_DRAFT}.project_target_hidden", "(self, hidden_states)", _MODEL),
    Hook(f"{_DRAFT}._build_fused_kv_buffers", "(self)", _MODEL),
    Hook(f"{_DRAFT}.load_weights", "(self, weights, weight_mapper=None, **kwargs)", _MODEL),
    Hook(f"{_DRAFT}.load_weights_from_target_model", "(self, target_model)", _MODEL),
    Hook(
        f"{_HEAD}.apply_markov_chain_logits",
        "(self, base_logits, first_prev_tokens, argmax_fn=None, vocab_slice=None)",
        _DSPARK_MODEL,
    ),
    Hook(f"{_HEAD}.has_markov_head", "property (self)", _DSPARK_MODEL),
)

_FIELDS = (
    "decoding_type, max_draft_len, speculative_model, attention_backend, block_size, mask_token_id, target_layer_ids"
)
_CONFIG = "llmapi.llm_args:DSparkDecodingConfig"

SNAPSHOTS: tuple[Snapshot, ...] = (
    Snapshot("1.3.0rc", 27, (*_COMMON, Hook(_CONFIG, _FIELDS, _PAGES["1.3.0rc27"], "fields", "called"))),
    Snapshot(
        "1.4.0rc",
        1,
        (
            *_COMMON,
            Hook(f"{_WORKER}._draft_block_width", "(self, draft_model)", _DFLASH, side="called"),
            Hook(_CONFIG, f"{_FIELDS}, moe_backend", _PAGES["1.4.0rc1"], "fields", "called"),
        ),
    ),
)
"""Oldest first."""

OPTIONS_SOURCE = _OPTIONS
"""Where it was read that ``block_size`` must equal ``max_draft_len``, and is taken from the checkpoint where ``config.yaml`` is silent."""
