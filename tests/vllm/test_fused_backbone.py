"""The drafter's layers on this package's kernels over vLLM's kind of cache, against the torch model. vLLM's modules are imitated."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

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


@pytest.fixture(scope="module")
def drafter() -> Iterator[Drafter]:
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
    with torch.inference_mode():
        yield Drafter(network, embed.to(DEVICE), head.to(DEVICE))


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


@pytest.fixture(params=[64, 0], ids=["our products", "the vendor's"])
def served(
    request: pytest.FixtureRequest, drafter: Drafter
) -> tuple[FusedBackbone, dict[str, Any], Tensor, list[Tensor]]:
    """The backbone after the context of three requests was stored: itself, attention metadata, states and block tables."""
    torch.manual_seed(1)
    backbone = FusedBackbone(as_vllm(drafter), requests=4, longest=64, few=request.param)
    table = torch.randperm(PAGES, device=DEVICE)[: 3 * 10].view(3, 10).int()
    states = [
        torch.randn(length + 2, TAPS * 64, device=DEVICE) for length in LENGTHS
    ]  # two rows a request are rejected
    positions = [torch.arange(len(rows), device=DEVICE) for rows in states]
    slots = [
        torch.where(at < length, table[n, at // PAGE].long() * PAGE + at % PAGE, -1)
        for n, (at, length) in enumerate(zip(positions, LENGTHS, strict=True))
    ]
    combined = torch.cat(states) @ backbone.geometry.weights.fc.T
    every = torch.cat(slots)
    assert backbone.store(combined, torch.cat(positions), [every, every[:], every[:]])
    metadata = {f"layers.{index}": SimpleNamespace(block_table=table) for index in range(3)}
    return backbone, metadata, table, states


def test_layers_equal_the_torch_model(served: Any, drafter: Drafter) -> None:
    """Three requests, one without a context, and a fourth of padding; twice, as a graph replays."""
    backbone, metadata, table, states = served
    anchors = torch.tensor([3, 41, 59], device=DEVICE)
    taps = torch.zeros(3, max(LENGTHS), TAPS * 64, device=DEVICE)
    for n, length in enumerate(LENGTHS):
        taps[n, :length] = states[n][:length]
    wanted = drafter.draft(anchors, taps, torch.tensor(LENGTHS, device=DEVICE), return_intermediates=True)
    ids = torch.full((4, BLOCK), MASK, dtype=torch.int32, device=DEVICE)
    ids[:3, 0], ids[3] = anchors, 0
    positions = torch.zeros(4, BLOCK, dtype=torch.int64, device=DEVICE)
    positions[:3] = torch.tensor(LENGTHS, device=DEVICE)[:, None] + torch.arange(BLOCK, device=DEVICE)
    for entry in metadata.values():
        entry.block_table = torch.cat((table, torch.zeros_like(table[:1])))
    for _ in range(2):
        got = backbone.run(ids.flatten(), positions.flatten(), metadata)
        assert got is not None
        assert wanted.layer_outputs is not None
        torch.testing.assert_close(
            got.view(4, BLOCK, -1)[:3], wanted.pre_injection.view(3, BLOCK, -1), rtol=1e-4, atol=1e-4
        )
        assert torch.equal(backbone.last.anchor_ids[:3], anchors)
        if backbone.last.sums is not None:
            torch.testing.assert_close(backbone.last.sums.sum(0), got.pow(2).sum(1), rtol=1e-4, atol=1e-3)


def test_without_a_cache_blocks_see_themselves(served: Any) -> None:
    """While vLLM measures memory there is no cache yet; an empty context gives the same."""
    backbone, metadata, _, _ = served
    ids, positions = (
        torch.full((2 * BLOCK,), MASK, device=DEVICE),
        torch.zeros(2 * BLOCK, dtype=torch.int64, device=DEVICE),
    )
    alone = backbone.run(ids, positions, None).clone()
    torch.testing.assert_close(alone, backbone.run(ids, positions, metadata))


def test_what_it_does_not_know_is_left_to_vllm(served: Any) -> None:
    backbone, metadata, _, _ = served
    ids, positions = torch.full((BLOCK,), MASK, device=DEVICE), torch.zeros(BLOCK, dtype=torch.int64, device=DEVICE)
    assert backbone.run(ids[:-1], positions[:-1], metadata) is None
    assert backbone.run(ids, positions, [metadata]) is None
    assert backbone.run(ids, positions, dict.fromkeys(metadata, SimpleNamespace())) is None
    states, slots = torch.randn(2, 64, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    assert not backbone.store(states, slots, [slots, slots.clone(), slots])
    assert not backbone.store(states, slots, [slots, None, slots])
    layer = backbone._backbone.layers[1].self_attn.attn
    layer.kv_cache = layer.kv_cache[:, :1]
    assert backbone.run(ids, positions, metadata) is None
    assert not backbone.store(states, slots, slots)
