"""The hooks of vLLM as they were read in the published wheels of 0.26.0, 0.32.0 and 0.33.0."""

from __future__ import annotations

from dspine_export.vllm.signatures import Hook

ADD_CLI_ARGS = Hook("engine.arg_utils:EngineArgs.add_cli_args", "(parser)")
CREATE_SPECULATIVE_CONFIG = Hook(
    "engine.arg_utils:EngineArgs.create_speculative_config", "(self, target_model_config, target_parallel_config)"
)
CREATE_ENGINE_CONFIG = Hook("engine.arg_utils:EngineArgs.create_engine_config", "(self, usage_context=, headless=)")
REPLACED = (ADD_CLI_ARGS, CREATE_SPECULATIVE_CONFIG, CREATE_ENGINE_CONFIG)

_SPECULATOR = "v1.worker.gpu.spec_decode.dspark.speculator:DSparkSpeculator"
_DFLASH = "model_executor.models.qwen3_dflash"

CONFIGURATION_HOOKS = (
    *REPLACED,
    Hook("model_executor.models.registry:_ModelRegistry.register_model", "(self, model_arch, model_cls)"),
    Hook("transformers_utils.configs.speculators.algos:register_speculator", "(name)"),
)
"""What `plugin`, `command_line` and `engine_arguments` rely on."""

WORKER_HOOKS = (
    Hook(f"{_SPECULATOR}.__init__", "(self, vllm_config, device)"),
    Hook(f"{_SPECULATOR}.load_draft_model", "(self, target_model, target_attn_layer_names)"),
    Hook(f"{_SPECULATOR}._sample_sequential", "(self, num_reqs, head_hidden)"),
    Hook("v1.worker.gpu.spec_decode.dspark.utils:load_dspark_model", "(target_model, vllm_config)"),
    Hook("v1.worker.gpu.spec_decode.eagle.eagle3_utils:get_eagle3_aux_layers_from_config", "(spec_config)"),
    Hook("distributed.communication_op:tensor_model_parallel_all_gather", "(input_, dim=)"),
    Hook("distributed.communication_op:tensor_model_parallel_all_reduce", "(input_)"),
    Hook(f"{_DFLASH}:DFlashQwen3Model.__init__", "(self, *, vllm_config, start_layer_id=, prefix=)"),
    Hook(f"{_DFLASH}:DFlashQwen3Model.forward", "(self, input_ids, positions, input_embeds=)"),
    Hook(f"{_DFLASH}:DFlashQwen3Model.embed_input_ids", "(self, input_ids)"),
    Hook(
        f"{_DFLASH}:DFlashQwen3Model.precompute_and_store_context_kv",
        "(self, context_states, context_positions, context_slot_mapping=)",
    ),
    Hook(f"{_DFLASH}:DFlashQwen3Model._build_fused_kv_buffers", "(self)"),
    Hook(f"{_DFLASH}:DFlashQwen3Attention.forward", "(self, positions, hidden_states)"),
    Hook(f"{_DFLASH}:DFlashQwen3ForCausalLM.__init__", "(self, *, vllm_config, prefix=)"),
    Hook(f"{_DFLASH}:DFlashQwen3ForCausalLM.load_weights", "(self, weights)"),
    Hook(f"{_DFLASH}:DFlashQwen3ForCausalLM.get_draft_kv_cache_layer_names", "(self)"),
)
"""What `draft_model`, `target_head`, `proposal` and `walk_hook` rely on."""

_OVERRIDE = "config.speculative:SpeculativeConfig._apply_composed_hf_override"
_SCHEDULER = Hook(
    "v1.core.sched.scheduler:Scheduler.__init__",
    "(self, vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size=, mm_registry=, include_finished_set=, "
    "log_stats=)",
)
_LOOKAHEAD = Hook("config.vllm:VllmConfig.num_lookahead_tokens", "(self)")
_COMMON = (*CONFIGURATION_HOOKS, *WORKER_HOOKS)

HOOKS_0_26 = (*_COMMON, Hook(_OVERRIDE, "(target_hf_overrides, hf_config)"), _SCHEDULER)
HOOKS_0_32 = (*_COMMON, Hook(_OVERRIDE, "(target_hf_overrides, hf_config)"), _LOOKAHEAD)
HOOKS_0_33 = (
    *_COMMON,
    Hook(_OVERRIDE, "(target_hf_overrides, hf_config, transformers_mtp_overrides=)"),
    _LOOKAHEAD,
)
