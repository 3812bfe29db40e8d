"""The drafter's layers in float8 on this package's kernels, against the torch model that rounds in the same places."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_export.model.drafter import Drafter
from dspine_export.vllm import product_weights
from dspine_export.vllm.fused_backbone import FusedBackbone
from dspine_export.vllm.fused_support import products
from tests.vllm.imitated import (
    BLOCK,
    DEVICE,
    LENGTHS,
    as_vllm,
    block_rows,
    random_drafter,
    round_products,
    rounded_linear,
    taps_of,
    with_context,
)
from tools.rounded_model import round_trip, rounded_activations

FEW, MANY = 64, 0  # most rows of our own products


@pytest.fixture(scope="module")
def drafter() -> Iterator[Drafter]:
    made = random_drafter()
    with torch.inference_mode():
        yield made


def widened(drafter: Drafter, backbone: SimpleNamespace) -> Drafter:
    """The torch model with the numbers that the rounded modules stand for."""
    network = copy.deepcopy(drafter.model)
    for layer, modules in zip(network.layers, backbone.layers, strict=True):
        qkv, o, gate_up, down = (
            product_weights.matrix(one).float() * product_weights.row_scales(one)[:, None] for one in products(modules)
        )
        own, mlp = layer.self_attn, layer.mlp
        sizes = [one.weight.shape[0] for one in (own.q_proj, own.k_proj, own.v_proj)]
        parts = [*qkv.split(sizes), o, *gate_up.chunk(2), down]
        linears = (own.q_proj, own.k_proj, own.v_proj, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        for linear, weight in zip(linears, parts, strict=True):
            linear.weight = nn.Parameter(weight, requires_grad=False)
    return Drafter(network, drafter.embed_tokens, drafter.lm_head)


def drafted(backbone: FusedBackbone) -> tuple[Tensor, Tensor]:
    """States before the last injection of three blocks, [3, B, d], and the tapped states of their contexts."""
    metadata, table, states = with_context(backbone)
    got = backbone.run(*block_rows(metadata, table, torch.tensor([3, 41, 59], device=DEVICE)))
    assert got is not None
    return got.view(4, BLOCK, -1)[:3].clone(), taps_of(states)


def reference(drafter: Drafter, taps: Tensor) -> Tensor:
    anchors, lengths = torch.tensor([3, 41, 59], device=DEVICE), torch.tensor(LENGTHS, device=DEVICE)
    return drafter.draft(anchors, taps, lengths, return_intermediates=True).pre_injection.view(3, BLOCK, -1)


@pytest.mark.parametrize("few", [FEW, MANY], ids=["our products", "the vendor's"])
@pytest.mark.parametrize("per", ["tensor", "channel"])
def test_layers_multiply_rounded_weights(drafter: Drafter, per: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are rounded to float32, that is not at all: what is left must be equal. The context is in pages."""
    monkeypatch.setattr("dspine_export.runtime.float8.NARROW", torch.float32)
    modules = as_vllm(drafter)
    round_products(modules, per)
    got, taps = drafted(FusedBackbone(modules, requests=4, longest=64, few=few))
    torch.testing.assert_close(got, reference(widened(drafter, modules), taps), rtol=1e-4, atol=1e-4)
    plain = reference(drafter, taps)
    assert 0.01 < float((got - plain).norm() / plain.norm()) < 0.3, "rounding shows"


@pytest.mark.usefixtures("true_rounding")
@pytest.mark.parametrize("few", [FEW, MANY], ids=["our products", "the vendor's"])
def test_activations_are_rounded_where_the_torch_model_rounds_them(drafter: Drafter, few: int) -> None:
    """Few rows: the context's alone. A value in the middle between two of e4m3 may go either way, so rows are compared as wholes."""
    modules = as_vllm(drafter)
    round_products(modules, "channel")
    got, taps = drafted(FusedBackbone(modules, requests=4, longest=64, few=few))
    model, errors = widened(drafter, modules), {}
    for block in (False, True):
        with rounded_activations(model.model, block=block, fc=False):
            wanted = reference(model, taps)
        errors[block] = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).flatten()
    right, wrong = errors[few == MANY], errors[few != MANY]
    assert float(right.median()) < 1e-3
    assert float(right.max()) < 0.05
    assert float(wrong.min()) > 10 * float(right.median())


def test_refreshed_weights_are_those_of_the_modules(drafter: Drafter) -> None:
    """Numbers overwritten in place reach every copy: a pass made before then equals one made behind it."""
    modules = as_vllm(drafter)
    round_products(modules, "tensor")
    backbone = FusedBackbone(modules, requests=4, longest=64, few=FEW)
    before, _ = drafted(backbone)
    generator = torch.Generator(DEVICE).manual_seed(5)
    for layer in modules.layers:
        for module in products(layer):
            weight = torch.randn(module.weight.t().shape, generator=generator, device=DEVICE) * 0.1
            new = rounded_linear(weight, "tensor")
            module.weight.copy_(new.weight)
            module.weight_scale.copy_(new.weight_scale)
    backbone.refresh()
    after, _ = drafted(backbone)
    anew, _ = drafted(FusedBackbone(modules, requests=4, longest=64, few=FEW))
    torch.testing.assert_close(after, anew)
    assert not torch.allclose(after, before, rtol=0.1)


class Fp8PtpcOnlineLinearMethod:
    """By its name alone."""


@pytest.mark.usefixtures("true_rounding")
def test_tapped_states_are_rounded_for_their_projection(drafter: Drafter) -> None:
    """In float8 it is this package's product; scales written anew reach it."""
    modules = as_vllm(drafter)
    round_products(modules, "channel")
    assert FusedBackbone(modules, requests=4, longest=64).combine(torch.zeros(1, 8, device=DEVICE)) is None, "it is vLLM's"
    fc = modules.fc = rounded_linear(drafter.model.fc.weight, "tensor")
    fc.quant_method = Fp8PtpcOnlineLinearMethod()
    backbone = FusedBackbone(modules, requests=4, longest=64)
    taps = torch.randn(5, fc.weight.shape[0], device=DEVICE)
    wanted = round_trip(taps) @ (product_weights.matrix(fc).float() * product_weights.row_scales(fc)[:, None]).T
    got = backbone.combine(taps)
    assert got is not None
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    fc.weight_scale.mul_(2)
    backbone.refresh()
    doubled = backbone.combine(taps)
    assert doubled is not None
    torch.testing.assert_close(doubled, 2 * wanted, rtol=1e-4, atol=1e-4)
    assert backbone.combine(taps[:0]) is None


class Fp8LinearMethod:
    """By its name alone."""


class UnquantizedLinearMethod:
    """By its name alone."""


def linear(**changes: object) -> SimpleNamespace:
    """A module of 32 outputs and 64 inputs as vLLM leaves it, in float8 unless changed."""
    made = rounded_linear(torch.randn(32, 64), "channel")
    made.quant_method, made.bias, made.weight_block_size = Fp8PtpcOnlineLinearMethod(), None, None
    vars(made).update(changes)
    return made


def test_what_can_be_multiplied_with() -> None:
    assert product_weights.obstacle(linear(), 64) is None
    assert product_weights.obstacle(linear(weight_scale=torch.ones(1)), 64) is None
    plain = linear(weight=torch.zeros(32, 64, dtype=torch.bfloat16), quant_method=UnquantizedLinearMethod())
    assert product_weights.obstacle(plain, 64) is None
    assert not product_weights.is_rounded(plain)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bias": torch.zeros(32)}, "with a bias"),
        ({"input_scale": torch.ones(1)}, "static scales of activations"),
        ({"weight_block_size": [128, 128]}, "scales of blocks"),
        ({"quant_method": Fp8LinearMethod()}, "quantised by Fp8LinearMethod"),
        ({"weight_scale": torch.ones(2)}, "neither one float32 scale nor one a row"),
        ({"weight_scale": torch.ones(1, dtype=torch.float64)}, "neither one float32 scale"),
        ({"weight": torch.zeros(64, 32).to(torch.float8_e4m3fn)}, "stored otherwise"),
        ({"weight": torch.zeros(32, 48).to(torch.float8_e4m3fn).t()}, "stored otherwise"),
        ({"weight": torch.zeros(32, 64).to(torch.float8_e5m2)}, "of torch.float8_e5m2"),
        ({"weight": torch.zeros(32, 64, dtype=torch.bfloat16)}, "quantised by Fp8PtpcOnlineLinearMethod"),
        ({"weight": torch.zeros(32 * 64, dtype=torch.int32)}, "without a matrix"),
        ({"weight": None}, "without a matrix"),
    ],
)
def test_what_stands_in_the_way_is_named(changes: dict[str, object], words: str) -> None:
    reason = product_weights.obstacle(linear(**changes), 64)
    assert reason is not None
    assert words in reason
