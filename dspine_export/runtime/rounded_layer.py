"""A decoder layer of many rows in float8: products as `float8.scaled_product` chooses them, and kernels that round what the next one reads.

Rounded are qkv, o, gate_up and down, weights and activations. The injection is the unrounded one of `vendor_layer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from dspine_export.runtime.float8 import RoundedRows, Scales, Scratch, own_plan
from dspine_export.runtime.packed_weights import PackedLayer
from dspine_export.runtime.pass_step import Step
from dspine_export.runtime.vendor_layer import VendorLayers

if TYPE_CHECKING:
    from dspine_export.runtime.kernel_pass import DraftPass


class RoundedLayers(VendorLayers):
    """Launches. Where o and down are products of our own, they add to x; else they leave what is to be added in `update`, and whatever
    comes next adds it.

    Args:
        scales: of the rounded weights. rows: at least ``normed``, ``attended`` and ``activated``, of the pass's rows; None: own ones.

    Attributes:
        adds: whether o and down add to x.
    """

    def __init__(self, draft: DraftPass, scales: Scales, rows: Mapping[str, RoundedRows] | None = None) -> None:
        super().__init__(draft)
        self._scales = scales
        if rows is None:
            rows = {name: RoundedRows.empty(draft.rows, k, draft.x.device) for name, k in self.widths().items()}
        self.rows = rows
        self._scratch = Scratch()
        self.adds = all(own_plan(w, draft.x) is not None for layer in draft.weights.layers for w in (layer.o, layer.down))

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
        self.rows[name].times(weight, self._scales[weight.data_ptr()], out, scratch=self._scratch)

    @property
    def _pending(self) -> Tensor | None:
        """What is still to be added to x after `_added_product`."""
        return None if self.adds else self.update

    def _added_product(self, name: str, weight: Tensor) -> None:
        """x += the product, or `update` = the product."""
        scales, x = self._scales[weight.data_ptr()], self.draft.x
        if self._pending is None:
            self.rows[name].times(weight, scales, x, residual=x, scratch=self._scratch)
        else:
            self.rows[name].times(weight, scales, self._pending, scratch=self._scratch)

    def _add_and_norm(self, gain: Tensor, normed: Tensor | None = None) -> None:
        """Adds what is pending to x; its norm is rounded, and stored unrounded where a place is given."""
        draft = self.draft
        self._round("normed", draft.x, update=self._pending, gain=gain, eps=draft.eps, normed=normed)

    def _layer(self, index: int, layer: PackedLayer) -> list[Step]:
        draft = self.draft
        return [
            Step("qkv", partial(self._product, "normed", layer.qkv, draft.qkv)),
            Step("attention", partial(draft.attend, index, layer)),
            Step("norm", partial(self._round, "attended", draft.attended)),
            Step("o", partial(self._added_product, "attended", layer.o)),
            Step("norm", partial(self._add_and_norm, layer.post_norm)),
            Step("gate_up", partial(self._product, "normed", layer.gate_up, self.gate_up)),
            Step("silu", partial(self._round, "activated", self.gate_up, silu=True)),
            Step("down", partial(self._added_product, "activated", layer.down)),
        ]

    def add_steps(self) -> list[Step]:
        """Adds what is pending to x."""
        pending = self._pending
        return [] if pending is None else [Step("add", lambda: self.draft.x.add_(pending))]

    def _injection(self, layer: PackedLayer, following: Tensor, *, last: bool) -> list[Step]:
        return [*self.add_steps(), *super()._injection(layer, following, last=last)]

    def _rounded_normed(self) -> tuple[Tensor, Tensor]:
        rows = self.rows["normed"]
        return rows.values, rows.scales
