"""Whether a drafter's layers can run on this package's kernels inside vLLM: everything that the kernels take for granted, looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dspine_export.vllm import product_weights

SWITCH, DEFAULT = "DSPINE_VLLM_FUSED", "1"  # 0: vLLM's own layers
_ROTATIONS = ("RotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding")


def obstacle(backbone: Any, ranks: int) -> str | None:
    """The first reason why `backbone` has to run on vLLM's layers; None: it need not.

    Args:
        ranks: tensor-parallel ranks.
    """
    if os.environ.get(SWITCH, DEFAULT) == "0":
        return f"{SWITCH}=0"
    weight = backbone.norm.weight
    if not _recent_nvidia(weight):
        return "the device is no NVIDIA GPU of compute capability 9.0 or later"
    if weight.dtype != torch.bfloat16:
        return f"the drafter runs in {weight.dtype}"
    if ranks != 1:
        return f"{ranks} tensor-parallel ranks"
    try:
        return next(_differences(backbone), None)
    except AttributeError as error:  # modules of another vLLM
        return f"modules of another kind: {error}"


def _recent_nvidia(weight: Tensor) -> bool:
    return weight.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(weight.device)[0] >= 9


def _differences(backbone: Any) -> Iterator[str]:
    """What the modules do that the kernels do not."""
    embedding = backbone.embed_tokens
    if backbone.has_separate_mask_embedding:
        yield "a mask embedding of its own"
    if type(embedding).__name__ != "VocabParallelEmbedding":
        yield f"embedding {type(embedding).__name__}"
    yield from filter(None, [product_weights.obstacle(embedding, backbone.config.hidden_size)])
    yield from _norms([backbone.norm, backbone.hidden_norm])
    for layer in backbone.layers:
        yield from _norms([layer.input_layernorm, layer.post_attention_layernorm])
        yield from _attention(layer.self_attn)
        yield from _products(layer, backbone.config)
    rounded = {product_weights.is_rounded(one) for layer in backbone.layers for one in products(layer)}
    if len(rounded) > 1:
        yield "some of the layers' matrices in float8 and others not"
    if not any(rounded) and not isinstance(getattr(backbone, "_fused_kv_weight", None), Tensor):
        yield "context projections that are not one matrix"


def products(layer: Any) -> tuple[Any, Any, Any, Any]:
    """The modules of a layer that multiply: qkv, o, gate_up, down."""
    return layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj


def _norms(norms: list[Any]) -> Iterator[str]:
    for norm in norms:
        if type(norm).__name__ != "RMSNorm" or not norm.has_weight or norm.variance_size_override is not None:
            yield f"norm {type(norm).__name__}"


def _attention(attention: Any) -> Iterator[str]:
    inner, rotary = attention.attn, attention.rotary_emb
    implementation = inner.impl
    if type(implementation).__name__ != "FlashAttentionImpl":
        yield f"attention {type(implementation).__name__}"
    if attention.sliding_window is not None or not attention.causal:
        yield "a sliding window, or attention that is not causal"
    if attention.attention_sink_bias is not None or attention.v_scale is not None:
        yield "attention sinks or scaled values"
    special = ("alibi_slopes", "logits_soft_cap", "kv_sharing_target_layer_name")
    if any(getattr(implementation, name, None) for name in special):
        yield "biased, capped or shared attention"
    if getattr(implementation, "dcp_world_size", 1) > 1:
        yield "a context that is spread over ranks"
    if inner.kv_cache_torch_dtype != torch.bfloat16:
        yield f"a cache of {inner.kv_cache_torch_dtype}"
    if type(rotary).__name__ not in _ROTATIONS or not rotary.is_neox_style or rotary.rotary_dim != attention.head_dim:
        yield f"rotation {type(rotary).__name__}"
    yield from _norms([attention.q_norm, attention.k_norm])


def _products(layer: Any, config: Any) -> Iterator[str]:
    attention, mlp = layer.self_attn, layer.mlp
    if type(mlp).__name__ != "Qwen2MLP" or type(mlp.act_fn).__name__ != "SiluAndMul":
        yield f"MLP {type(mlp).__name__}"
        return
    inner = attention.num_heads * attention.head_dim
    widths = (config.hidden_size, inner, config.hidden_size, config.intermediate_size)
    yield from filter(None, map(product_weights.obstacle, products(layer), widths))
