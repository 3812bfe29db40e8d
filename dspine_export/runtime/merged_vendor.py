"""A decoder layer of many rows whose injection shares its products with the next layer's projections: `injection_form` says how."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from dspine_kernels.rows import write_and_project

from dspine_export.runtime.packed_weights import PackedLayer
from dspine_export.runtime.pass_step import Step
from dspine_export.runtime.vendor_layer import VendorLayers

if TYPE_CHECKING:
    from dspine_export.runtime.kernel_pass import DraftPass


class MergedVendorLayers(VendorLayers):
    """Launches of the form ``merged``."""

    def __init__(self, draft: DraftPass) -> None:
        super().__init__(draft)
        self.spread = draft.x.new_empty(draft.rows, draft.x.shape[1] + draft.qkv.shape[1])

    def steps(self) -> list[Step]:
        """All layers, the final norm, logits and candidates."""
        draft, layers = self.draft, self.draft.weights.layers
        steps = self._layer(0, layers[0])
        for index, layer in enumerate(layers[1:], 1):
            steps += self._merged(layers[index - 1])
            steps += self._layer(index, layer)[1:]
        return [*steps, *self._injection(layers[-1], draft.weights.norm, last=True), *self._candidates_of_head()]

    def _merged(self, layer: PackedLayer) -> list[Step]:
        draft, target = self.draft, self.draft.readout_of(last=False)
        read, spread = layer.read, layer.spread
        assert read is not None and spread is not None
        projected = target[:, target.shape[1] - draft.qkv.shape[1] :]
        finish = partial(write_and_project, draft.x, self.spread, projected, draft.eps, draft.block, draft.x, draft.qkv)
        return [
            Step("readout", lambda: torch.mm(draft.x, read.T, out=target)),
            *self._messages(target, last=False),
            Step("write", lambda: torch.mm(draft.z, spread.T, out=self.spread)),
            Step("write_norm", finish),
        ]
