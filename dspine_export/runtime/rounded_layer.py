"""A decoder layer of many rows in float8: products as `float8.scaled_product` chooses them, and kernels that round what the next one reads.

Rounded are qkv, o, gate_up and down, weights and activations. The injection is the unrounded one of `vendor_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from dspine_export.runtime.float8 import RoundedRows, Scales
from dspine_export.runtime.packed_weights import PackedLayer
from dspine_export.runtime.pass_step import Step
from dspine_export.runtime.vendor_layer import VendorLayers

if TYPE_CHECKING:
    from dspine_export.runtime.kernel_pass import DraftPass


class RoundedLayers(VendorLayers):
    """Launches. A layer leaves what its MLP adds in `update`; whatever comes next adds it to x.

    Args:
        scales: of the rounded weights. rows: at least ``normed``, ``attended`` and ``activated``, of the pass's rows; None: own ones.
    """

    def __init__(self, draft: DraftPass, scales: Scales, rows: Mapping[str, RoundedRows] | None = None) -> None:
        super().__init__(draft)
        self._scales = scales
        if rows is None:
            rows = {name: RoundedRows.empty(draft.rows, k, draft.x.device) for name, k in self.widths().items()}
        self.rows = rows

    def widths(self) -> dict[str, int]:
        """Columns of the rounded rows by name."""
        draft = self.draft
        return {
            "normed": draft.x.shape[1],
            "attended": draft.attended.shape[1],
            "activated": draft.activated.shape[1],
        }

    def first_step(self) -> Step:
        """Rounds the normed embeddings, which the first layer reads."""
        return Step("norm", partial(self._round, "normed", self.draft.normed))

    def _round(self, name: str, x: Tensor, **before: object) -> None:
        self.rows[name].round(x, **before)

    def _product(self, name: str, weight: Tensor, out: Tensor) -> None:
        self.rows[name].times(weight, self._scales[weight.data_ptr()], out)

    def _add_and_norm(self, gain: Tensor, normed: Tensor | None = None) -> None:
        """x += update; its norm is rounded, and stored unrounded where a place is given."""
        draft = self.draft
        self._round("normed", draft.x, update=self.update, gain=gain, eps=draft.eps, normed=normed)

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

    def add_step(self) -> Step:
        """x += update"""
        return Step("add", lambda: self.draft.x.add_(self.update))

    def _injection(self, layer: PackedLayer, following: Tensor, *, last: bool) -> list[Step]:
        return [self.add_step(), *super()._injection(layer, following, last=last)]

    def _rounded_normed(self) -> tuple[Tensor, Tensor]:
        rows = self.rows["normed"]
        return rows.values, rows.scales
