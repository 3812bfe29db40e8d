"""Configurations that vLLM would run into with a DSpine drafter, late, silently or in words about something else; each names its way out.

Everything is read from vLLM's arguments and the target's configuration, before a weight is loaded.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError

_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
# Options of vLLM's other drafters that change what is drafted or how it is accepted, and are not part of DSpine.
_FOREIGN_OPTIONS = (
    "enable_adaptive_verification",
    "use_local_argmax_reduction",
    "dspark_draft_topk",
    "num_speculative_tokens_per_batch_size",
    "use_heterogeneous_vocab",
)
# What rounds plain weights to float8 while they are loaded -> vLLM's word for it. Its own `fp8`, one scale a matrix, is deprecated there.
_FLOAT8 = {"fp8": "fp8_per_channel", "fp8_per_channel": "fp8_per_channel", "fp8_per_tensor": "fp8_per_tensor"}


def draft_length(config: DrafterConfig, asked: object) -> int:
    """K: what was asked for, else everything the block holds.

    Raises:
        UsageError: more than the drafter was trained to fill in, or no number.
    """
    most = config.block_size - 1
    if asked is None:
        return most
    if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= most:
        raise UsageError(
            "num_speculative_tokens does not fit the drafter's block",
            got=asked,
            expected=f"1 to {most}: block_size {config.block_size} is the anchor and {most} proposed tokens",
            fix=f"leave it out to get {most}",
        )
    return asked


def check_pair(config: DrafterConfig, target: Any) -> None:
    """Does the drafter belong to the target? ``target``: vLLM's ModelConfig.

    Raises:
        UsageError: multimodal target, other sizes, or tapped layers that the target does not have.
    """
    if target.is_multimodal_model:
        raise UsageError(
            "multimodal targets are not supported",
            got=target.model,
            fix="serve a text-only target, or leave dspine out",
        )
    depth = target.get_total_num_hidden_layers()
    for name, found, expected in (
        ("hidden size", config.hidden_size, target.get_hidden_size()),
        ("vocabulary", config.vocab_size, target.get_vocab_size()),
        ("number of target layers", config.num_target_layers or depth, depth),
    ):
        if found != expected:
            raise UsageError(
                f"drafter and target differ in {name}",
                where=target.model,
                got=f"{found} in the drafter",
                expected=f"{expected} in the target",
                fix="pass the drafter that was trained for this target",
            )
    if max(config.target_layer_ids) >= depth:
        raise UsageError(
            "tapped layer beyond the target's depth",
            where="dflash_config.target_layer_ids",
            got=list(config.target_layer_ids),
            expected=f"0 to {depth - 1}",
            fix="pass the drafter of this target (or the ids count from the embedding and are one too high)",
        )
    _check_length(config, target)


def check_parallelism(config: DrafterConfig, parallel: Any, options: Mapping[str, Any]) -> None:
    """Can the drafter share the target's matrices in this layout? ``parallel``: vLLM's ParallelConfig of the target.

    Raises:
        UsageError: no.
    """
    if parallel.pipeline_parallel_size > 1:
        raise UsageError(
            "pipeline parallelism is not supported with dspine",
            got=f"--pipeline-parallel-size {parallel.pipeline_parallel_size}",
            fix="use --tensor-parallel-size",
        )
    size = parallel.tensor_parallel_size
    asked = options.get("draft_tensor_parallel_size")
    if asked not in (None, size):
        raise UsageError(
            "the drafter uses the target's embedding and head, so both are split alike",
            got=f"draft_tensor_parallel_size {asked!r}",
            expected=f"{size}, the target's",
            fix="leave draft_tensor_parallel_size out",
        )
    heads, kv = config.num_heads, config.num_kv_heads
    if heads % size or (kv % size and size % kv) or config.intermediate_size % size:
        raise UsageError(
            "the drafter cannot be split over this many ranks",
            got=f"--tensor-parallel-size {size}",
            expected=f"a divisor of {heads} heads and {config.intermediate_size} MLP channels that fits {kv} key/value heads",
            fix="choose another --tensor-parallel-size",
        )


def quantisation(target: Any, options: Mapping[str, Any]) -> str | None:
    """vLLM's word for how the drafter's matrices are to be rounded; None: not at all. ``target``: vLLM's ModelConfig.

    Raises:
        UsageError: another format than float8, or a type that vLLM does not round.
    """
    asked = options.get("quantization")
    if asked is None:
        return None
    if not isinstance(asked, str) or asked not in _FLOAT8:
        raise UsageError(
            "the drafter's weights can be rounded to float8 only",
            got=f"quantization: {asked!r}",
            expected=f"one of {', '.join(_FLOAT8)}",
            fix="quantization: fp8, or leave it out",
        )
    if target.dtype not in (torch.bfloat16, torch.float16):
        raise UsageError(
            "vLLM rounds half types to float8 only",
            got=f"quantization: {asked} with dtype {str(target.dtype).removeprefix('torch.')}",
            expected="bfloat16 or float16",
            fix="--dtype bfloat16, or leave quantization out",
        )
    from vllm.platforms import current_platform

    if current_platform.is_cuda() and not current_platform.has_device_capability(89):
        raise UsageError(
            "a drafter in float8 needs a GPU that multiplies float8",
            got=f"quantization: {asked} on compute capability {current_platform.get_device_capability()}",
            expected="8.9 or later",
            fix="leave quantization out",
        )
    return _FLOAT8[asked]


def check_arguments(engine_args: Any, options: Mapping[str, Any], length: int) -> None:
    """What else is on the command line. Raises UsageError: an option that does not go with a DSpine drafter."""
    for key in _FOREIGN_OPTIONS:
        if options.get(key):
            raise UsageError("not an option of method dspine", got=f"{key}: {options[key]}", fix=f"leave {key} out")
    if getattr(engine_args, "enable_lora", False):
        raise UsageError(
            "LoRA adapters are not supported with dspine: the drafter reads the target's own embedding and head",
            got="--enable-lora",
            fix="merge the adapter into the target, or serve it without --speculative-model",
        )
    cache = options.get("kv_cache_dtype") or getattr(engine_args, "kv_cache_dtype", "auto")
    if "fp8" in str(cache) or "int" in str(cache) or "fp4" in str(cache):
        raise UsageError(
            "the drafter's context cannot be kept in a quantised K/V cache: its keys were never calibrated for it",
            got=f"kv_cache_dtype {cache}",
            expected="auto, or bfloat16",
            fix="--kv-cache-dtype auto",
        )
    budget = getattr(engine_args, "max_num_batched_tokens", None)
    if budget is not None and budget <= length + 1:
        raise UsageError(
            "a step has no room for one drafted block",
            got=f"--max-num-batched-tokens {budget}",
            expected=f"more than {length + 1}: the anchor and {length} proposed tokens; that many again per concurrent request",
            fix="raise --max-num-batched-tokens, or lower num_speculative_tokens",
        )


def check_runner() -> None:
    """Raises UsageError: Model Runner V2 is switched off or cannot start, and only it knows block-parallel drafters."""
    if os.environ.get(_RUNNER_VARIABLE) in ("0", "false", "False"):
        raise UsageError(
            "dspine needs vLLM's Model Runner V2", got=f"{_RUNNER_VARIABLE}=0", fix=f"unset {_RUNNER_VARIABLE}"
        )
    if not importlib.import_module("vllm.triton_utils").HAS_TRITON:
        raise UsageError(
            "dspine needs vLLM's Model Runner V2, and that needs Triton",
            got="no Triton that works here",
            fix="install the triton package that belongs to this torch",
        )


def limit_requests(vllm_config: Any, length: int) -> tuple[int, int] | None:
    """Keep the draft pass, length + 1 rows a request, inside ``max_num_batched_tokens``, for which its buffers are made.

    Returns:
        The limits of concurrently active requests before and after, or None where nothing had to change.
    """
    scheduler = vllm_config.scheduler_config
    if not hasattr(scheduler, "max_num_active_seqs"):
        return None
    before = scheduler.max_num_active_seqs or scheduler.max_num_seqs
    after = max(1, scheduler.max_num_batched_tokens // (length + 1))
    if after >= before:
        return None
    scheduler.max_num_active_seqs = after
    return before, after


def _check_length(config: DrafterConfig, target: Any) -> None:
    if target.max_model_len > config.max_position_embeddings:
        raise UsageError(
            "max_model_len goes beyond the positions the drafter knows",
            got=f"{target.max_model_len} tokens",
            expected=f"at most {config.max_position_embeddings}, the drafter's max_position_embeddings",
            fix=f"--max-model-len {config.max_position_embeddings}",
        )
