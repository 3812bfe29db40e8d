"""Weights in float8 (e4m3), one float32 scale per output channel, and the draft pass that multiplies with them.

Activations are rounded as well, every row by its own largest value, so that the GPU multiplies float8 by float8 at any number of rows;
sums are float32. What a draft proposes decides speed, never correctness: the target verifies.

Rounded are the large matrices of every layer and a copy of the language-model head that ranks candidates; norms, gates, tables, the
context projections and the head rows that score transitions are not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from dspine_kernels.topk import top_candidates
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.runtime.float8 import Scales, quantise
from dspine_export.runtime.kernel_pass import CacheView, DraftPass
from dspine_export.runtime.packed_weights import PackedDrafter, PackedLayer
from dspine_export.runtime.pass_step import Step
from dspine_export.runtime.rounded_layer import RoundedLayers

ROUNDED = ("qkv", "o", "gate_up", "down", "readout", "write")


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


class Fp8Layers(RoundedLayers):
    """`RoundedLayers` whose injections and head are rounded as well."""

    def __init__(self, draft: DraftPass, head: Tensor, scales: Scales) -> None:
        super().__init__(draft, scales)
        self._head = head
        draft.logits = draft.x.new_empty(draft.rows, draft.config.vocab_size)

    def widths(self) -> dict[str, int]:
        """Columns of the rounded rows by name."""
        draft, widths = self.draft, super().widths()
        transfer = draft.config.transfer
        return widths if transfer is None else widths | {"x": draft.x.shape[1], "z": transfer.message_size}

    def steps(self) -> list[Step]:
        """All layers, the final norm, logits and candidates."""
        draft, layers = self.draft, self.draft.weights.layers
        following = [layer.input_norm for layer in layers[1:]] + [draft.weights.norm]
        steps = [self.first_step()]
        for index, layer in enumerate(layers):
            steps += self._layer(index, layer)
            if draft.config.transfer is None:
                steps.append(Step("norm", partial(self._add_and_norm, following[index], draft.normed)))
            else:
                steps += self._injection(layer, following[index], last=index == len(layers) - 1)
        top = partial(top_candidates, draft.logits, draft.candidate_ids, draft.keys, draft.block)
        head = partial(self._product, "normed", self._head, draft.logits)
        return [*steps, Step("lm_head", head), Step("candidates", top)]

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
