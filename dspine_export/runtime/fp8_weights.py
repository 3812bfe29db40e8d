"""Weights in float8 (e4m3), one float32 scale per output channel, and the draft passes that multiply with them.

Rounded are the large matrices of every layer and a copy of the language-model head that ranks candidates; norms, gates, tables, the
context projections and the head rows that score transitions are not. Few rows go through our own products, which widen the weights in
registers and leave activations and injections alone. Of many rows the activations are rounded as well, every row by its own largest value,
and the injections' matrices, so that the GPU multiplies float8 by float8. Sums are float32. What a draft proposes decides speed, never
correctness: the target verifies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from dspine_kernels.linear import FEW_NARROW_ROWS
from dspine_kernels.topk import top_candidates
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.runtime.float8 import Scales, quantise
from dspine_export.runtime.fused_layer import FusedLayers
from dspine_export.runtime.injection_form import Form
from dspine_export.runtime.kernel_pass import CacheView, DraftPass
from dspine_export.runtime.merged_layer import MergedFusedLayers
from dspine_export.runtime.packed_weights import PackedDrafter, PackedLayer
from dspine_export.runtime.pass_step import Step
from dspine_export.runtime.rounded_layer import RoundedLayers

LAYER = ("qkv", "o", "gate_up", "down")
INJECTION = ("readout", "write")


@dataclass(frozen=True)
class RoundedDrafter:
    """What `quantise_drafter` returns. `context` of the layers must not be used.

    Attributes:
        few: layers rounded but for their injections, for our own products. many: injections rounded too, none folded or merged.
        head: e4m3 [V, d]. scales: of every rounded matrix by its address.
    """

    few: PackedDrafter
    many: PackedDrafter
    head: Tensor
    scales: Scales

    def with_rotations(self, cos: Tensor, sin: Tensor) -> RoundedDrafter:
        """The same weights with other rotation tables."""
        return replace(self, few=replace(self.few, cos=cos, sin=sin), many=replace(self.many, cos=cos, sin=sin))


@torch.no_grad()
def quantise_drafter(packed: PackedDrafter) -> RoundedDrafter:
    """The drafter with rounded matrices. Nothing in it keeps the unrounded ones of its layers alive."""
    scales: dict[int, Tensor] = {}

    def rounded(layer: PackedLayer, names: tuple[str, ...]) -> PackedLayer:
        made: dict[str, Any] = {}
        for name in names:
            weight = getattr(layer, name)
            if weight is not None:
                made[name], by = quantise(weight)
                scales[made[name].data_ptr()] = by
        return replace(layer, **made)

    few, many = [], []
    for unrounded in packed.layers:
        layer = rounded(replace(unrounded, read=None, keys_values=None), LAYER)
        many.append(rounded(replace(layer, folded=None, spread=None), INJECTION))
        if layer.folded is not None and layer.readout is not None:
            folded = layer.folded.clone()  # was a view of a product with the next layer's unrounded projections
            layer = replace(layer, folded=folded, readout=folded[len(folded) - len(layer.readout) :])
        few.append(layer)
    head, by = quantise(packed.lm_head)
    scales[head.data_ptr()] = by
    plain = replace(packed, layers=tuple(many), merged=False)
    return RoundedDrafter(replace(packed, layers=tuple(few)), plain, head, scales)


def context_weights(packed: PackedDrafter) -> PackedDrafter:
    """What an append reads, copied so that the unrounded matrices of the layers can be freed."""

    def kept(layer: PackedLayer) -> PackedLayer:
        nothing = layer.o.new_empty(0, 0)  # a view would keep the matrix
        return replace(
            layer,
            qkv=layer.context.clone(),
            o=nothing,
            gate_up=nothing,
            down=nothing,
            readout=None,
            write=None,
            folded=None,
            read=None,
            spread=None,
            keys_values=None,
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
            Step("norm", partial(self._round, "x", draft.x, update=self._pending)),
            Step("readout", partial(self._product, "x", readout, target)),
            *self._messages(target, last=last),
            Step("norm", partial(self._round, "z", draft.z)),
            Step("write", partial(self._product, "z", write, self.update)),
            self._write_and_norm(following, last=last),
        ]


class FewFp8Pass(DraftPass):
    """`kernel_pass.DraftPass` of few rows."""

    def __init__(
        self, config: DrafterConfig, weights: RoundedDrafter, cache: CacheView, batch: int, *, form: Form | None = None
    ) -> None:
        self._rounded = weights
        super().__init__(config, weights.few, cache, batch, fused=True, form=form)

    def _layers(self, *, fused: bool) -> FusedLayers:
        layers = MergedFusedLayers if self.form == "merged" else FusedLayers
        return layers(self, self._rounded.scales, self._rounded.head)


class ManyFp8Pass(DraftPass):
    """`kernel_pass.DraftPass` of any number of rows."""

    def __init__(self, config: DrafterConfig, weights: RoundedDrafter, cache: CacheView, batch: int) -> None:
        super().__init__(config, weights.many, cache, batch, fused=False)
        self.layers = Fp8Layers(self, weights.head, weights.scales)
        self.steps = self._steps()


def fp8_pass(config: DrafterConfig, weights: RoundedDrafter, cache: CacheView, batch: int) -> DraftPass:
    """The pass for `batch` sequences, by its number of rows. Float32 is for comparison: everything rounded."""
    few = batch * config.block_size <= FEW_NARROW_ROWS and weights.few.embed_tokens.element_size() == 2
    return (FewFp8Pass if few else ManyFp8Pass)(config, weights, cache, batch)
