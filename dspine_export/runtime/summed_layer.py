"""Decoder layers whose projections meet in the attention: `injection_form` says how."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from dspine_kernels.linear import FEW_ROWS, SPREAD_PLAN, Workspace, linear, plan_for
from torch import Tensor

from dspine_export.runtime.float8 import Scales
from dspine_export.runtime.fused_layer import FusedLayers
from dspine_export.runtime.packed_weights import PackedLayer
from dspine_export.runtime.pass_step import Step
from dspine_export.runtime.projections import Projections
from dspine_export.runtime.side_stream import SideStream
from dspine_export.runtime.vendor_layer import VendorLayers

if TYPE_CHECKING:
    from dspine_export.runtime.kernel_pass import DraftPass


class _Spread:
    """The product of the messages with `PackedLayer.spread`, which writes the state and keeps the effect on the next projections apart."""

    def __init__(self, draft: DraftPass) -> None:
        (rows, width), more, size = draft.x.shape, draft.qkv.shape[1], draft.x.element_size()
        many = rows > FEW_ROWS and size == 2
        plan = SPREAD_PLAN if many else plan_for(rows, width + more, draft.z.shape[1], size)
        self._draft, self._plan = draft, plan
        self._workspace = Workspace.for_plans([(plan, draft.rows, width + more)], draft.x.device)
        self.effect = torch.empty_like(draft.qkv)
        self.squares = draft.squares.new_empty(plan.tiles(width), draft.rows)

    def run(self, weight: Tensor, squares: Tensor, before: Tensor, after: Tensor) -> None:
        """after [R, d] = before + the write, for states `before` whose sums of squares are in parts float32 [T, R]."""
        draft, width = self._draft, before.shape[1]
        linear(
            draft.z, weight, after, self._plan, self._workspace, squares=squares, norm_width=width, write=True, block=draft.block,
            residual=before, squares_out=self.squares, squares_columns=width, rest=self.effect,
        )  # fmt: skip


class SummedVendorLayers(VendorLayers):
    """By the vendor's products, but for the write."""

    def __init__(self, draft: DraftPass) -> None:
        super().__init__(draft)
        self._spread = _Spread(draft)

    def steps(self) -> list[Step]:
        """All layers, the final norm, logits and candidates."""
        draft, layers = self.draft, self.draft.weights.layers
        steps = self._layer(0, layers[0])
        target = draft.readout_of(last=False)
        parts = Projections(target[:, target.shape[1] - draft.qkv.shape[1] :], self._spread.effect, self._spread.squares)
        for index, layer in enumerate(layers[1:], 1):
            steps += self._summed(layers[index - 1], target)
            steps += [Step("attention", partial(draft.attend, index, layer, parts)), *self._layer(index, layer)[2:]]
        return [*steps, *self._injection(layers[-1], draft.weights.norm, last=True), *self._candidates_of_head()]

    def _summed(self, layer: PackedLayer, target: Tensor) -> list[Step]:
        draft, read, spread = self.draft, layer.read, layer.spread
        assert read is not None and spread is not None
        return [
            Step("readout", lambda: torch.mm(draft.x, read.T, out=target)),
            *self._messages(target, last=False, squares=draft.squares),
            Step("write", partial(self._spread.run, spread, draft.squares.view(1, -1), draft.x, draft.x)),
        ]


class SummedFusedLayers(FusedLayers):
    """By our products. The next layer's projections still read a state while the write leaves its successor elsewhere, so states alternate
    between two buffers and end in the pass's.
    """

    def __init__(self, draft: DraftPass, scales: Scales | None = None, head: Tensor | None = None) -> None:
        super().__init__(draft, scales, head)
        rows, size, (width, more) = draft.rows, draft.x.element_size(), (draft.x.shape[1], draft.qkv.shape[1])
        self.side, self.projected = SideStream(draft.x.device), torch.empty_like(draft.qkv)
        layers_size = draft.weights.layers[0].qkv.element_size()
        self.plans["projections"] = plan_for(rows, more, width, layers_size, x_bytes=size, beside=True)
        # Of its own: it runs beside the others.
        self._side_workspace = Workspace.for_plans([(self.plans["projections"], rows, more)], draft.x.device)
        self._spread = _Spread(draft)
        buffers = (draft.x, torch.empty_like(draft.x))
        last = len(draft.weights.layers) - 1
        self._states = [buffers[(last - index) % 2] for index in range(last + 1)]
        draft.embedded = self._states[0]

    def steps(self) -> list[Step]:
        """All layers, the final norm, logits and candidates."""
        draft, layers = self.draft, self.draft.weights.layers
        following = [layer.input_norm for layer in layers[1:]] + [draft.weights.norm]
        steps = self._layer(0, layers[0], following[0], self._states[0])
        parts = Projections(self.projected, self._spread.effect, self._spread.squares)
        for index, layer in enumerate(layers[1:], 1):
            steps += self._summed(index - 1, layers[index - 1], layer)
            attention = Step("attention", partial(draft.attend, index, layer, parts))
            steps += [attention, *self._layer(index, layer, following[index], self._states[index])[2:]]
        return [*steps, *self._injection(layers[-1], following[-1], last=True), *self._candidates_of_head()]

    def _summed(self, index: int, layer: PackedLayer, following: PackedLayer) -> list[Step]:
        target = self.draft.readout_of(last=False)
        read, spread, (before, after) = layer.folded, layer.spread, self._states[index : index + 2]
        assert read is not None and spread is not None
        project: Any = partial(
            self._linear, "projections", before, following.qkv, self.projected, workspace=self._side_workspace
        )
        return [
            Step("projections", partial(self.side.run, project)),
            Step("readout", partial(self._linear, "readout", before, read, target)),
            self._message(target, last=False),
            Step("write", partial(self._spread.run, spread, self.squares["down"], before, after)),
            Step("projections", self.side.join),
        ]
