"""A decoder layer of few rows whose injection is two launches, or, merged with the next layer's projections, none more than a layer
without one has: `injection_form` says why that is the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dspine_kernels.injection.gated_write import gated_write, write_parts
from torch import Tensor

from dspine_export.runtime.fused_layer import FusedLayers
from dspine_export.runtime.packed_weights import PackedLayer
from dspine_export.runtime.pass_step import Step

if TYPE_CHECKING:
    from dspine_export.runtime.kernel_pass import DraftPass


class GatedLayers(FusedLayers):
    """Launches of the forms ``gated`` and ``merged``."""

    def __init__(self, draft: DraftPass) -> None:
        super().__init__(draft)
        self.merged = draft.form == "merged"
        d, beside = draft.config.hidden_size, draft.qkv.shape[1] if self.merged else 0
        self.squares["write"] = draft.squares.new_empty(write_parts(d), draft.rows)
        self._squares_beside = draft.squares.new_empty(write_parts(d, beside), draft.rows)  # where qkv is written too

    def _layer(self, index: int, layer: PackedLayer, following: Tensor) -> list[Step]:
        draft, steps = self.draft, super()._layer(index, layer, following)
        down = partial(self._linear, "down", draft.activated, layer.down, draft.x, residual=draft.x)
        steps[-1] = Step("down", partial(down, squares_out=self.squares["down"]))  # a readout follows: no norm, no gain
        if self.merged and index > 0:  # the injection before made q, k and v, all but 1 / rms
            steps[:2] = [Step("attention", partial(draft.attend, index, layer, self._squares_beside))]
        return steps

    def _injection(self, index: int, layer: PackedLayer, following: Tensor, *, last: bool) -> list[Step]:
        draft, weights = self.draft, self.draft.weights
        merged = self.merged and not last
        read, write = (layer.read, layer.spread) if merged else (layer.folded, layer.write)
        assert weights.gates is not None and read is not None and write is not None
        name, target, (count, rank) = (
            "last_readout" if last else "readout",
            draft.readout_of(last=last),
            weights.gates.shape,
        )
        parts, end, tile = self.squares[name], count + rank, self.plans[name].weight_rows
        readout = partial(
            self._linear, name, draft.x, read, target, squares_out=parts, squares_first=count, squares_columns=end
        )
        # Of the last layer only the norm is read on; its state from before the write stays: the transition redoes that write.
        finish = partial(
            gated_write, target[:, :count], parts[count // tile : -(-end // tile)], rank, weights.gate_bias, weights.token_table,
            draft.anchor_ids, write, draft.x, self.squares["down"], draft.written if last else draft.x,
            self._squares_beside if merged else self.squares["write"], draft.block,
        )  # fmt: skip
        if merged:
            finish = partial(finish, before=target[:, end:], after=draft.qkv)
        else:
            finish = partial(finish, gain=following, scaled=draft.normed)
        if last:
            finish = partial(finish, z=draft.z, receiver_gate=draft.receiver_gate)
        return [Step("readout", readout), Step("write", finish)]
