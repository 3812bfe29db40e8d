"""Decoder layers whose injection does not hold up the next layer's projections: `injection_form` says how."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from dspine_kernels.linear import Workspace, plan_for
from dspine_kernels.rows import write_and_project
from torch import Tensor

from dspine_export.runtime.float8 import Scales
from dspine_export.runtime.fused_layer import FusedLayers
from dspine_export.runtime.packed_weights import PackedLayer
from dspine_export.runtime.pass_step import Step
from dspine_export.runtime.side_stream import SideStream
from dspine_export.runtime.vendor_layer import VendorLayers

if TYPE_CHECKING:
    from dspine_export.runtime.kernel_pass import DraftPass


class MergedVendorLayers(VendorLayers):
    """The form ``merged`` by the vendor's products."""

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


class MergedFusedLayers(FusedLayers):
    """The form ``merged`` by our products."""

    def __init__(self, draft: DraftPass, scales: Scales | None = None, head: Tensor | None = None) -> None:
        super().__init__(draft, scales, head)
        rows, size, (width, more) = draft.rows, draft.x.element_size(), (draft.x.shape[1], draft.qkv.shape[1])
        self.side = SideStream(draft.x.device)
        self.projected, self.spread = torch.empty_like(draft.qkv), draft.x.new_empty(rows, width + more)
        layers_size = draft.weights.layers[0].qkv.element_size()
        self.plans["projections"] = plan_for(rows, more, width, layers_size, x_bytes=size, beside=True)
        self.plans["spread"] = plan_for(rows, width + more, draft.z.shape[1], size)
        # Of their own: one product runs beside the others, the other has no part in the size of theirs.
        self._side_workspace = Workspace.for_plans([(self.plans["projections"], rows, more)], draft.x.device)
        self._spread_workspace = Workspace.for_plans([(self.plans["spread"], rows, width + more)], draft.x.device)

    def steps(self) -> list[Step]:
        """All layers, the final norm, logits and candidates."""
        draft, layers = self.draft, self.draft.weights.layers
        following = [layer.input_norm for layer in layers[1:]] + [draft.weights.norm]
        steps = self._layer(0, layers[0], following[0])
        for index, layer in enumerate(layers[1:], 1):
            steps += self._merged(layers[index - 1], layer)
            steps += self._layer(index, layer, following[index])[1:]
        return [*steps, *self._injection(layers[-1], following[-1], last=True), *self._candidates_of_head()]

    def _merged(self, layer: PackedLayer, following: PackedLayer) -> list[Step]:
        draft, target = self.draft, self.draft.readout_of(last=False)
        read, spread = layer.folded, layer.spread
        assert read is not None and spread is not None
        workspace = self._side_workspace
        project = partial(self._linear, "projections", draft.x, following.qkv, self.projected, workspace=workspace)
        finish = partial(
            write_and_project, draft.x, self.spread, self.projected, draft.eps, draft.block, draft.x, draft.qkv
        )
        return [
            Step("projections", partial(self.side.run, project)),
            Step("readout", partial(self._linear, "readout", draft.x, read, target)),
            self._message(target, last=False),
            Step(
                "write", partial(self._linear, "spread", draft.z, spread, self.spread, workspace=self._spread_workspace)
            ),
            Step("projections", self.side.join),
            Step("write_norm", finish),
        ]
