"""Weights in float8 (e4m3), one float32 scale per output channel, and the draft pass that multiplies with them.

Activations are rounded as well, every row by its own largest value, so that the GPU multiplies float8 by float8 at any number of rows;
sums are float32. What a draft proposes decides speed, never correctness: the target verifies.

Rounded are the large matrices of every layer and a copy of the language-model head that ranks candidates; norms, gates, tables, the
context projections and the head rows that score transitions are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from dspine_kernels.rows import round_rows
from dspine_kernels.topk import top_candidates
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.runtime.kernel_pass import CacheView, DraftPass
from dspine_export.runtime.packed_weights import PackedDrafter, PackedLayer
from dspine_export.runtime.pass_step import Step
from dspine_export.runtime.vendor_layer import VendorLayers

NARROW = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
ROUNDED = ("qkv", "o", "gate_up", "down", "readout", "write")
Scales = Mapping[int, Tensor]  # by address of the rounded weight


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> float8_e4m3fn [N, K] and float32 scales [N] with weight ~ values * scales. A row of zeros keeps scale 1."""
    peak = weight.abs().amax(dim=1).float()
    scales = torch.where(peak > 0, peak / LARGEST, 1.0)
    chunks = [
        (rows.float() / by[:, None]).clamp(-LARGEST, LARGEST).to(NARROW)
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
        return replace(layer, folded=None, **changes)

    layers = tuple(rounded_layer(layer) for layer in packed.layers)
    head = rounded(packed.lm_head)
    return replace(packed, layers=layers), head, scales


def context_weights(packed: PackedDrafter) -> PackedDrafter:
    """What an append reads, copied so that the unrounded matrices of the layers can be freed."""

    def kept(layer: PackedLayer) -> PackedLayer:
        nothing = layer.o[:0, :0]
        return replace(
            layer,
            qkv=layer.context.clone(),
            o=nothing,
            gate_up=nothing,
            down=nothing,
            readout=None,
            write=None,
            folded=None,
        )

    return replace(packed, layers=tuple(kept(layer) for layer in packed.layers))


def scaled_product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """out [R, N] = (x x_scales) (weight scales)^T for x [R, K], weight [N, K] in e4m3, scales float32 [R] and [N].

    The vendor's product takes bfloat16 results and sizes in multiples of 16; others are widened first, which is slow.
    """
    if out.is_cuda and out.dtype == torch.bfloat16 and not weight.shape[0] % 16 and not weight.shape[1] % 16:
        torch._scaled_mm(
            x, weight.T, scale_a=x_scales[:, None], scale_b=scales[None, :], out_dtype=out.dtype, use_fast_accum=True, out=out
        )  # fmt: skip
    else:
        out.copy_((x.float() * x_scales[:, None]) @ (weight.float() * scales[:, None]).T)


class Fp8Layers(VendorLayers):
    """The vendor's float8 products; the kernels between them round what the next one reads."""

    def __init__(self, draft: DraftPass, head: Tensor, scales: Scales) -> None:
        super().__init__(draft)
        self._head, self._scales = head, scales
        widths = dict.fromkeys(("x", "normed"), draft.x.shape[1])
        widths |= {"attended": draft.attended.shape[1], "activated": draft.activated.shape[1]}
        if draft.config.transfer is not None:
            widths["z"] = draft.config.transfer.message_size
        self._rows = {name: draft.x.new_empty(draft.rows, k, dtype=NARROW) for name, k in widths.items()}
        self._row_scales = {name: draft.squares.new_empty(draft.rows) for name in widths}
        draft.logits = draft.x.new_empty(draft.rows, draft.config.vocab_size)

    def steps(self) -> list[Step]:
        """All layers, the final norm, logits and candidates."""
        draft, layers = self.draft, self.draft.weights.layers
        following = [layer.input_norm for layer in layers[1:]] + [draft.weights.norm]
        steps = [Step("norm", partial(self._round, "normed", draft.normed))]
        for index, layer in enumerate(layers):
            steps += self._layer(index, layer)
            if draft.config.transfer is None:
                steps.append(Step("norm", partial(self._add_and_norm, following[index])))
            else:
                steps += self._injection(layer, following[index], last=index == len(layers) - 1)
        top = partial(top_candidates, draft.logits, draft.candidate_ids, draft.keys, draft.block)
        head = partial(self._product, "normed", self._head, draft.logits)
        return [*steps, Step("lm_head", head), Step("candidates", top)]

    def _round(self, name: str, x: Tensor, *, silu: bool = False, update: Tensor | None = None) -> None:
        round_rows(x, self._rows[name], self._row_scales[name], silu=silu, update=update)

    def _add_and_norm(self, gain: Tensor) -> None:
        draft, name = self.draft, "normed"
        round_rows(
            draft.x, self._rows[name], self._row_scales[name], update=self.update, gain=gain, eps=draft.eps, normed=draft.normed
        )  # fmt: skip

    def _product(self, name: str, weight: Tensor, out: Tensor) -> None:
        scaled_product(self._rows[name], self._row_scales[name], weight, self._scales[weight.data_ptr()], out)

    def _layer(self, index: int, layer: PackedLayer) -> list[Step]:
        draft = self.draft
        return [
            Step("qkv", partial(self._product, "normed", layer.qkv, draft.qkv)),
            Step("attention", partial(draft.attend, index, layer)),
            Step("norm", partial(self._round, "attended", draft.attended)),
            Step("o", partial(self._product, "attended", layer.o, self.update)),
            Step("norm", partial(self._add_and_norm, layer.post_norm)),
            Step("gate_up", partial(self._product, "normed", layer.gate_up, self.gate_up)),
            Step("silu", partial(self._round, "activated", self.gate_up, silu=True)),
            Step("down", partial(self._product, "activated", layer.down, self.update)),
        ]

    def _injection(self, layer: PackedLayer, following: Tensor, *, last: bool) -> list[Step]:
        draft = self.draft
        readout, write = layer.readout, layer.write
        assert readout is not None and write is not None
        target = draft.readout_of(last=last)
        return [
            Step("norm", partial(self._round, "x", draft.x, update=self.update)),
            Step("readout", partial(self._product, "x", readout, target)),
            *self._messages(target, last=last),
            Step("norm", partial(self._round, "z", draft.z)),
            Step("write", partial(self._product, "z", write, self.update)),
            self._write_and_norm(following, last=last),
            Step("norm", partial(self._round, "normed", draft.normed)),
        ]


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
        super().__init__(config, weights, cache, batch, fused=False)
        self.layers = Fp8Layers(self, head, scales)
        self.steps = self._steps()
