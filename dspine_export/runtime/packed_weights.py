"""A drafter's weights as the kernels want them: merged projections, stacked gates, the folded token table."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from dspine_kernels.transition import fold_scores
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.model.drafter import Drafter
from dspine_export.model.injection import AdjacentInjection
from dspine_export.model.layer import DecoderLayer
from dspine_export.model.rope import rotary_tables


@dataclass(frozen=True)
class PackedLayer:
    """One decoder layer. qkv [(H + 2 Hkv) D, d], gate_up [2F, d] (gate above up), write [d, m].

    readout [r, d]; the last layer's is [r + m, d], with Wr^T below: the transition needs Wr^T x of that layer. folded, where asked for, is
    the gates times the readout, [3m, d], above readout (a view of it then): the gates' products cost no launch of their own.

    read and spread, where asked for, are of every layer but the last: read is folded above the next layer's projections times the gain of
    their norm, spread [d + (H + 2 Hkv) D, m] is write above those projections times write (`injection_form`). The parts are views then,
    the next layer's qkv too, whose input_norm is ones therefore, and whose key and value projections without the gain are a copy.
    """

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    readout: Tensor | None
    write: Tensor | None
    window: int | None
    folded: Tensor | None = None
    read: Tensor | None = None
    spread: Tensor | None = None
    keys_values: Tensor | None = None

    @property
    def context(self) -> Tensor:
        """Key and value projections [2 Hkv D, d] of normed context, a view of qkv where that has no gain in it."""
        return self.qkv[self.o.shape[1] :] if self.keys_values is None else self.keys_values


@dataclass(frozen=True)
class PackedDrafter:
    """Everything a draft pass and a context append read. gates [3m, r] is G_r above G_p above M; token_table [V, 2m].

    score_table [V, m] and gram [m, m]: see `dspine_kernels.transition.fold_scores`.
    """

    layers: tuple[PackedLayer, ...]
    fc: Tensor
    hidden_norm: Tensor
    norm: Tensor
    gates: Tensor | None
    gate_bias: Tensor | None
    token_table: Tensor | None
    score_table: Tensor | None
    gram: Tensor | None
    embed_tokens: Tensor
    lm_head: Tensor
    cos: Tensor
    sin: Tensor
    merged: bool = False


@torch.no_grad()
def pack(drafter: Drafter, max_positions: int, *, folded: bool = False, merged: bool = False) -> PackedDrafter:
    """Packs a bound drafter.

    Args:
        max_positions: longest context plus one block, for the rotation tables [max_positions, D/2].
        folded: with `PackedLayer.folded`. merged: with that, `PackedLayer.read` and `PackedLayer.spread`.
    """
    model, config = drafter.model, drafter.config
    cos, sin = _rotation_tables(config, max_positions, drafter.embed_tokens)
    injection = model.injection
    layers = [
        _pack_layer(layer, injection, index, config.attention_window(index), last=index == config.num_layers - 1)
        for index, layer in enumerate(model.layers)
        if isinstance(layer, DecoderLayer)
    ]
    gates = bias = table = scores = gram = None
    if injection is not None and model.transfer_codes is not None:
        parts = (injection.receiver_gate.weight, injection.predecessor_gate.weight, injection.message.weight)
        gates, bias = torch.cat(parts).contiguous(), injection.bias
        table = _token_table(model.transfer_codes, injection)
        if folded or merged:
            layers = [_fold_gates(layer, gates) for layer in layers]
        if merged:
            _merge_following(layers, len(gates))
        scores, gram = fold_scores(drafter.lm_head, model.norm.weight, injection.write_weight(len(layers) - 1))
    return PackedDrafter(
        tuple(layers), model.fc.weight, model.hidden_norm.weight, model.norm.weight, gates, bias, table, scores, gram,
        drafter.embed_tokens, drafter.lm_head, cos, sin, merged and gates is not None,
    )  # fmt: skip


def with_positions(packed: PackedDrafter, config: DrafterConfig, count: int) -> PackedDrafter:
    """The same weights with rotation tables for `count` positions."""
    cos, sin = _rotation_tables(config, count, packed.embed_tokens)
    return replace(packed, cos=cos, sin=sin)


def _rotation_tables(config: DrafterConfig, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [count, D/2]; the other half repeats them."""
    positions = torch.arange(count, device=like.device).unsqueeze(0)
    cos, sin = rotary_tables(positions, config.head_dim, config.rope_theta, like.dtype)
    half = config.head_dim // 2
    return cos[0, 0, :, :half].contiguous(), sin[0, 0, :, :half].contiguous()


def _pack_layer(
    layer: DecoderLayer, injection: AdjacentInjection | None, index: int, window: int | None, *, last: bool
) -> PackedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    readout = write = None
    if injection is not None:
        readout, write = injection.readout_weight(index), injection.write_weight(index)
        if last:
            readout = torch.cat((readout, write.T)).contiguous()
    return PackedLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)).contiguous(),
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
        o=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).contiguous(),
        down=mlp.down_proj.weight,
        readout=readout,
        write=write,
        window=window,
    )


def _fold_gates(layer: PackedLayer, gates: Tensor) -> PackedLayer:
    assert layer.readout is not None
    product = gates.float() @ layer.readout[: gates.shape[1]].float()
    folded = torch.cat((product.to(gates.dtype), layer.readout))
    return replace(layer, folded=folded, readout=folded[gates.shape[0] :])


def _merge_following(layers: list[PackedLayer], gates: int) -> None:
    """Every layer's `read` and `spread`, in place; products in float32, stored in the compute dtype."""
    for index in range(len(layers) - 1):
        layer, following = layers[index : index + 2]
        folded, write = layer.folded, layer.write
        assert folded is not None and write is not None
        wide = following.qkv.float() * following.input_norm.float()
        read = torch.cat((folded, wide.to(folded.dtype)))
        spread = torch.cat((write, (wide @ write.float()).to(write.dtype)))
        end = len(folded)
        layers[index] = replace(
            layer, read=read, spread=spread, folded=read[:end], readout=read[gates:end], write=spread[: len(write)]
        )
        layers[index + 1] = replace(
            following,
            qkv=read[end:],
            keys_values=following.context.clone(),
            input_norm=torch.ones_like(following.input_norm),
        )


def _token_table(codes: Tensor, injection: AdjacentInjection) -> Tensor:
    """[M ; G_p] sqrt(r) c_v, products in float32, stored in the compute dtype. [V, 2m]"""
    weight = torch.cat((injection.message.weight, injection.predecessor_gate.weight)).float() * math.sqrt(
        injection.rank
    )
    chunks = [(rows.float() @ weight.T).to(codes.dtype) for rows in codes.split(16384)]
    return torch.cat(chunks)
