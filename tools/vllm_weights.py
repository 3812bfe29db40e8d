"""Meaningful random weights in a running engine's drafter, and the torch model made of the very same numbers.

vLLM's dummy weights are 1e-3 wide, norm gains included: fine for speed, but the injection would hardly move a state, and agreement
would prove nothing. `randomise` overwrites them in place, where CUDA graphs read them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspine_export.model.drafter import Drafter
from dspine_export.model.drafter_model import DrafterModel
from dspine_export.model.token_table import fold_token_table
from dspine_export.runtime.float8 import quantise
from dspine_export.vllm.product_weights import is_rounded, matrix, row_scales

HEAD_TAIL = 1.5  # head rows are scaled by u^-1.5: a few tokens lead clearly, as in a trained model, instead of thousands in a tie


@torch.inference_mode()
def randomise(model: Any, seed: int = 0) -> Tensor:
    """Fills drafter, shared embedding and shared head of a `DSpineDraftModel`. Returns the transfer codes [V, r] behind its table."""
    backbone, injection = model.model, model.model.injection
    generator = torch.Generator(device=injection.token_table.device).manual_seed(seed)

    def normal(target: Tensor, deviation: float) -> None:
        target.copy_(torch.randn(target.shape, generator=generator, device=target.device) * deviation)

    rounded = rounded_modules(backbone)
    for module in rounded:
        plain = torch.empty(module.weight.t().shape, device=module.weight.device)
        normal(plain, plain.shape[-1] ** -0.5)
        overwrite(module, plain)
    known = {id(value) for module in rounded for value in (module.weight, module.weight_scale)}
    for name, parameter in backbone.named_parameters():
        if id(parameter) in known:
            continue
        if parameter.ndim == 1 and not name.endswith("injection.bias"):
            parameter.fill_(1.0)
        elif name != "injection.token_table":
            normal(parameter, parameter.shape[-1] ** -0.5)
    normal(backbone.embed_tokens.weight, 1.0)
    head = model.lm_head.weight
    scale = torch.rand(head.shape[0], 1, generator=generator, device=head.device).clamp_min(1e-6) ** -HEAD_TAIL
    head.copy_(torch.randn(head.shape, generator=generator, device=head.device) * scale * head.shape[1] ** -0.5)
    codes = torch.randn(injection.token_table.shape[0], injection.rank, generator=generator, device=head.device)
    codes = torch.nn.functional.normalize(codes, dim=-1).to(head.dtype)
    table = fold_token_table(codes, injection.message.weight, injection.predecessor_gate.weight)
    injection.token_table.copy_(table)
    _refresh_context_weights(backbone)
    _refresh_tables(model)
    return codes


def rounded_modules(backbone: Any) -> list[Any]:
    """vLLM's linear modules in float8."""
    return [module for module in backbone.modules() if hasattr(module, "weight_scale") and is_rounded(module)]


def overwrite(module: Any, weight: Tensor) -> None:
    """Rounds `weight` [N, K] into a module in float8, under one scale or one a row, as it has; in place."""
    one = module.weight_scale.numel() == 1
    values, scales = quantise(weight.reshape(1, -1) if one else weight)
    module.weight.copy_(values.view(weight.shape).t())
    module.weight_scale.copy_(scales.view(module.weight_scale.shape))


def widened(module: Any) -> Tensor:
    """The matrix [N, K] that a module multiplies with; float32 where it is stored in float8."""
    return matrix(module).float() * row_scales(module)[:, None] if is_rounded(module) else module.weight


def _refresh_context_weights(backbone: Any) -> None:
    """vLLM keeps copies of key/value projections and key norms for the context; none of the former where they are in float8."""
    attention = [layer.self_attn for layer in backbone.layers]
    if backbone._fused_kv_weight is not None:
        backbone._fused_kv_weight.copy_(torch.cat([one.qkv_proj.weight[one.q_size :] for one in attention]))
    backbone._k_norm_weights.copy_(torch.stack([one.k_norm.weight for one in attention]))


def _refresh_tables(model: Any) -> None:
    """The kernels' tables are folded from the weights at the first draft."""
    decoder, fused = model._decoder, model.model.fused()
    if fused is not None:
        fused.refresh()
    if decoder is not None and decoder.tables is not None:
        folded = type(decoder.tables).of(decoder.injection, decoder.norm_weight, decoder.head)
        for name in ("read", "scores", "gram"):
            getattr(decoder.tables, name).copy_(getattr(folded, name))
        narrow = decoder.head.narrow
        if narrow is not None:
            rounded = type(narrow).of(decoder.head.weight, decoder.count)
            narrow.values.copy_(rounded.values)
            narrow.scales.copy_(rounded.scales)


@torch.no_grad()
def torch_drafter(model: Any, codes: Tensor, dtype: torch.dtype = torch.float32) -> Drafter:
    """The eager model with the engine's weights (tensor parallel size 1), rounded ones as they are, in `dtype`; copies."""
    backbone = model.model
    config = backbone.drafter
    state = {"fc.weight": widened(backbone.fc)}
    state |= {f"{name}.weight": getattr(backbone, name).weight for name in ("hidden_norm", "norm")}
    for index, layer in enumerate(backbone.layers):
        attention, prefix = layer.self_attn, f"layers.{index}."
        sizes = [attention.q_size, attention.kv_size, attention.kv_size]
        for name, rows in zip("qkv", widened(attention.qkv_proj).split(sizes), strict=True):
            state[f"{prefix}self_attn.{name}_proj.weight"] = rows
        for name, rows in zip(("gate", "up"), widened(layer.mlp.gate_up_proj).chunk(2), strict=True):
            state[f"{prefix}mlp.{name}_proj.weight"] = rows
        for name in ("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.down_proj", "input_layernorm",
                     "post_attention_layernorm"):  # fmt: skip
            state[f"{prefix}{name}.weight"] = widened(layer.get_submodule(name))
    own = ("gates", "token_table")
    state |= {f"injection.{name}": value for name, value in backbone.injection.named_parameters() if name not in own}
    with torch.device("meta"):
        network = DrafterModel(config)
    network.transfer_codes = None
    network.load_state_dict({name: value.to(dtype) for name, value in state.items()}, strict=True, assign=True)
    network.transfer_codes = codes.to(dtype)
    matrices = (backbone.embed_tokens.weight, model.lm_head.weight)
    embed, head = (weight[: config.vocab_size].to(dtype) for weight in matrices)
    return Drafter(network.eval().requires_grad_(False), embed, head)
