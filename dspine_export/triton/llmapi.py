"""Tensors of the llmapi model that comes with TensorRT-LLM (read from its `all_models/llmapi/tensorrt_llm/config.pbtxt`, main branch).

That model takes its sampling settings from optional inputs; the server refuses requests that name others.
"""

from __future__ import annotations

from dspine_export.triton.contract import Tensor

_SAMPLING = {
    "best_of": "TYPE_INT32",
    "temperature": "TYPE_FP32",
    "top_k": "TYPE_INT32",
    "top_p": "TYPE_FP32",
    "frequency_penalty": "TYPE_FP32",
    "presence_penalty": "TYPE_FP32",
    "max_tokens": "TYPE_INT32",
    "seed": "TYPE_UINT64",
    "exclude_input_from_output": "TYPE_BOOL",
    "return_perf_metrics": "TYPE_BOOL",
}
_SWITCHES = ("streaming", "return_finish_reason", "return_stop_reason", "return_cumulative_logprob", "stop")
_COUNTERS = {
    "kv_cache_reused_block": "TYPE_INT32",
    "kv_cache_missed_block": "TYPE_INT32",
    "kv_cache_alloc_new_blocks": "TYPE_INT32",
    "kv_cache_alloc_total_blocks": "TYPE_INT32",
    "kv_cache_hit_rate": "TYPE_FP32",
}
_TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")

INPUTS: tuple[Tensor, ...] = (
    Tensor("text_input", "TYPE_STRING", (-1,)),
    *(Tensor(name, "TYPE_BOOL", (1,), optional=True) for name in _SWITCHES),
    *(Tensor(f"sampling_param_{name}", dtype, (1,), optional=True) for name, dtype in _SAMPLING.items()),
    Tensor("sampling_param_stop", "TYPE_STRING", (-1,), optional=True),
)
OUTPUTS: tuple[Tensor, ...] = (
    *(Tensor(name, "TYPE_STRING", (-1,)) for name in ("text_output", "finish_reason", "stop_reason")),
    Tensor("cumulative_logprob", "TYPE_FP32", (-1,)),
    *(Tensor(name, dtype, (-1,)) for name, dtype in _COUNTERS.items()),
    *(Tensor(name, "TYPE_INT64", (1,)) for name in _TIMES),
    Tensor("acceptance_rate", "TYPE_FP32", (1,)),
    *(Tensor(name, "TYPE_INT32", (1,)) for name in ("total_accepted_draft_tokens", "total_draft_tokens")),
)
