"""What `FusedBackbone` reads of vLLM, imitated: modules over one pool of pages, attention metadata, block tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig, TransferConfig
from dspine_export.model.drafter import Drafter
from dspine_export.model.drafter_model import DrafterModel
from dspine_export.model.rope import rotary_tables
from dspine_export.vllm.fused_backbone import FusedBackbone
from dspine_export.vllm.injection_weights import FoldedInjection
from dspine_export.vllm.weight_names import CODES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK, PAGE, PAGES, MASK, HEADS, KV_HEADS, DIM, TAPS, VOCABULARY = 6, 4, 40, 7, 4, 2, 16, 2, 60
LENGTHS = (13, 0, 30)


def config() -> DrafterConfig:
    return DrafterConfig(
        layout="specforge", architecture="DSpineDraftModel", hidden_size=64, num_layers=3, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=DIM, intermediate_size=96, vocab_size=VOCABULARY, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
        block_size=BLOCK, mask_token_id=MASK, target_layer_ids=tuple(range(TAPS)), num_target_layers=2, is_causal=True,
        layer_types=("full_attention",) * 3, sliding_window=None, dtype=None, transfer=TransferConfig(rank=32, message_size=16, top_k=8),
    )  # fmt: skip


def random_drafter() -> Drafter:
    """A drafter of `config` in float32; to be made and used in inference mode."""
    torch.manual_seed(0)
    network = DrafterModel(config())
    for name, parameter in network.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data.copy_(1 + 0.2 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
        del name
    network.transfer_codes = torch.nn.functional.normalize(torch.randn(VOCABULARY, 32), dim=-1)
    embed, head = torch.randn(VOCABULARY, 64), torch.randn(VOCABULARY, 64)
    network = network.to(DEVICE).eval().requires_grad_(False)
    network.transfer_codes = network.transfer_codes.to(DEVICE)
    return Drafter(network, embed.to(DEVICE), head.to(DEVICE))


def injection_of(drafter: Drafter) -> FoldedInjection:
    with torch.device(DEVICE):  # moving it later would part the gates from their views
        folded = FoldedInjection(config())
    own = {f"injection.{name}": value for name, value in drafter.model.injection.named_parameters()}
    folded.load(own | {CODES: drafter.model.transfer_codes})
    return folded


def as_vllm(drafter: Drafter) -> SimpleNamespace:
    """What `FusedBackbone` reads of vLLM's modules, over one pool of pages in which layers and heads lie as vLLM lays them out."""
    cos, sin = rotary_tables(torch.arange(80, device=DEVICE)[None], DIM, 1e4, torch.float32)
    rotary = SimpleNamespace(cos_sin_cache=torch.cat((cos[0, 0, :, : DIM // 2], sin[0, 0, :, : DIM // 2]), dim=1))
    pool = torch.full((3, PAGES, PAGE, KV_HEADS, 2 * DIM), float("nan"), device=DEVICE).transpose(2, 3)
    layers = []
    for index, layer in enumerate(drafter.model.layers):
        own, mlp = layer.self_attn, layer.mlp
        qkv = torch.cat([one.weight for one in (own.q_proj, own.k_proj, own.v_proj)])
        attention = SimpleNamespace(
            qkv_proj=SimpleNamespace(weight=qkv), o_proj=own.o_proj, q_norm=own.q_norm, k_norm=own.k_norm, rotary_emb=rotary,
            attn=SimpleNamespace(kv_cache=pool[index], layer_name=f"layers.{index}"),
        )  # fmt: skip
        gate_up = SimpleNamespace(weight=torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)))
        layers.append(
            SimpleNamespace(
                self_attn=attention, mlp=SimpleNamespace(gate_up_proj=gate_up, down_proj=mlp.down_proj),
                input_layernorm=layer.input_layernorm, post_attention_layernorm=layer.post_attention_layernorm,
            )
        )  # fmt: skip
    network, inner = drafter.model, HEADS * DIM
    return SimpleNamespace(
        drafter=config(), block=BLOCK, layers=layers, injection=injection_of(drafter), fc=network.fc, norm=network.norm,
        hidden_norm=network.hidden_norm, embed_tokens=SimpleNamespace(weight=drafter.embed_tokens),
        _fused_kv_weight=torch.cat([layer.self_attn.qkv_proj.weight[inner:] for layer in layers]),
        _k_norm_weights=torch.stack([layer.self_attn.k_norm.weight for layer in layers]),
    )  # fmt: skip


def round_products(backbone: SimpleNamespace, per: str) -> None:
    """The layers' matrices as vLLM's online float8 leaves them, with one scale per ``tensor`` or ``channel``."""
    for layer in backbone.layers:
        for holder, name in (
            (layer.self_attn, "qkv_proj"), (layer.self_attn, "o_proj"), (layer.mlp, "gate_up_proj"), (layer.mlp, "down_proj"),
        ):  # fmt: skip
            setattr(holder, name, rounded_linear(getattr(holder, name).weight, per))
    backbone._fused_kv_weight = None


def rounded_linear(weight: Tensor, per: str) -> SimpleNamespace:
    peak = weight.abs().amax(1, keepdim=True) if per == "channel" else weight.abs().amax().view(1)
    scale = peak.float() / 448
    values = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return SimpleNamespace(weight=values.t(), weight_scale=scale, input_scale=None)


def block_rows(metadata: dict[str, Any], table: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Ids and positions of three blocks behind `LENGTHS` and a fourth of padding, and metadata with its block table."""
    ids = torch.full((4, BLOCK), MASK, dtype=torch.int32, device=DEVICE)
    ids[:3, 0], ids[3] = anchors, 0
    positions = torch.zeros(4, BLOCK, dtype=torch.int64, device=DEVICE)
    positions[:3] = torch.tensor(LENGTHS, device=DEVICE)[:, None] + torch.arange(BLOCK, device=DEVICE)
    for entry in metadata.values():
        entry.block_table = torch.cat((table, torch.zeros_like(table[:1])))
    return ids.flatten(), positions.flatten(), metadata


def taps_of(states: list[Tensor]) -> Tensor:
    """The tapped states as the torch model takes them, [3, T, A*d]."""
    taps = torch.zeros(3, max(LENGTHS), TAPS * 64, device=DEVICE)
    for n, length in enumerate(LENGTHS):
        taps[n, :length] = states[n][:length]
    return taps


def with_context(backbone: FusedBackbone) -> tuple[dict[str, Any], Tensor, list[Tensor]]:
    """Stores the context of three requests: attention metadata, block tables and the tapped states, two rows a request too many."""
    torch.manual_seed(1)
    table = torch.randperm(PAGES, device=DEVICE)[: 3 * 10].view(3, 10).int()
    states = [
        torch.randn(length + 2, TAPS * 64, device=DEVICE) for length in LENGTHS
    ]  # two rows a request are rejected
    positions = [torch.arange(len(rows), device=DEVICE) for rows in states]
    slots = [
        torch.where(at < length, table[n, at // PAGE].long() * PAGE + at % PAGE, -1)
        for n, (at, length) in enumerate(zip(positions, LENGTHS, strict=True))
    ]
    taps = torch.cat(states)
    combined = backbone.combine(taps)
    if combined is None:
        combined = taps @ backbone.geometry.weights.fc.T
    every = torch.cat(slots)
    assert backbone.store(combined, torch.cat(positions), [every, every[:], every[:]])
    metadata = {f"layers.{index}": SimpleNamespace(block_table=table) for index in range(3)}
    return metadata, table, states
