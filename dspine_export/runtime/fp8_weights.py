"""Weights in float8 (e4m3) with one float32 scale per output channel, and the draft pass that reads them.

Weight-only: products multiply bfloat16 activations with weights widened in registers, sums in float32, so nothing but the rounding of the
weights changes. What a draft proposes decides speed, never correctness: the target verifies. A pass reads about half the bytes, which
pays while it is bound by them: at small batches (tools/results has times and what the rounding costs in acceptance length).

Rounded are the large matrices of every layer and a copy of the language-model head that ranks candidates; norms, gates, tables, the
context projections and the head rows that score transitions are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from dspine_kernels.linear import linear
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.runtime.fused_layer import FusedLayers
from dspine_export.runtime.kernel_pass import CacheView, DraftPass
from dspine_export.runtime.packed_weights import PackedDrafter, PackedLayer

LARGEST = 448.0  # of e4m3
ROUNDED = ("qkv", "o", "gate_up", "down", "readout", "write")
Scales = Mapping[int, Tensor]  # by address of the rounded weight


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> float8_e4m3fn [N, K] and float32 scales [N] with weight ~ values * scales. A row of zeros keeps scale 1."""
    peak = weight.abs().amax(dim=1).float()
    scales = torch.where(peak > 0, peak / LARGEST, 1.0)
    chunks = [
        (rows.float() / by[:, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        for rows, by in zip(weight.split(16384), scales.split(16384), strict=True)
    ]
    return torch.cat(chunks), scales


@torch.no_grad()
def quantise_drafter(packed: PackedDrafter) -> tuple[PackedDrafter, Tensor, Scales]:
    """The drafter with rounded matrices, the rounded head, and the scales of both. `context` of its layers must not be used."""
    scales: dict[int, Tensor] = {}

    def rounded(weight: Tensor) -> Tensor:
        values, by = quantise(weight)
        scales[values.data_ptr()] = by
        return values

    def rounded_layer(layer: PackedLayer) -> PackedLayer:
        present = {name: getattr(layer, name) for name in ROUNDED if getattr(layer, name) is not None}
        changes: dict[str, Any] = {name: rounded(weight) for name, weight in present.items()}
        return replace(layer, **changes)

    layers = tuple(rounded_layer(layer) for layer in packed.layers)
    head = rounded(packed.lm_head)
    return replace(packed, layers=layers), head, scales


def context_weights(packed: PackedDrafter) -> PackedDrafter:
    """What an append reads, copied so that the unrounded matrices of the layers can be freed."""

    def kept(layer: PackedLayer) -> PackedLayer:
        nothing = layer.o[:0, :0]
        return replace(
            layer, qkv=layer.context.clone(), o=nothing, gate_up=nothing, down=nothing, readout=None, write=None
        )

    return replace(packed, layers=tuple(kept(layer) for layer in packed.layers))


class Fp8Layers(FusedLayers):
    """Our products over rounded weights, for any number of rows."""

    def __init__(self, draft: DraftPass, head: Tensor, scales: Scales) -> None:
        self._head, self._scales = head, scales
        super().__init__(draft)

    def _linear(self, name: str, x: Tensor, weight: Tensor, out: Tensor, **epilogue: object) -> object:
        if name == "lm_head":
            weight = self._head
        width, eps = self.draft.config.hidden_size, self.draft.eps
        by = self._scales[weight.data_ptr()]
        plan = self.plans[name]
        return linear(x, weight, out, plan, self.workspace, norm_width=width, eps=eps, scales=by, **epilogue)


class Fp8DraftPass(DraftPass):
    """`kernel_pass.DraftPass` over what `quantise_drafter` returns."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: PackedDrafter,
        head: Tensor,
        scales: Scales,
        cache: CacheView,
        batch: int | None = None,
    ) -> None:
        super().__init__(config, weights, cache, batch, fused=True)
        self.layers = Fp8Layers(self, head, scales)
        self.steps = self._steps()
