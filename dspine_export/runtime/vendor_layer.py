"""A decoder layer of many rows: the vendor's products, and between them one kernel each for norms, SwiGLU and the injection."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from dspine_kernels.injection import gate_projections
from dspine_kernels.linear import WRITE_PLAN, WRITE_ROWS, Workspace, linear
from dspine_kernels.rows import rms_norm, silu_mul, write_and_norm
from dspine_kernels.topk import top_candidates
from torch import Tensor

from dspine_export.runtime.packed_weights import PackedLayer
from dspine_export.runtime.pass_step import Step

if TYPE_CHECKING:
    from dspine_export.runtime.kernel_pass import DraftPass


class VendorLayers:
    """Launches. squares: float32 [1, R], of x before the injection's write."""

    def __init__(self, draft: DraftPass) -> None:
        self.draft = draft
        self.squares = {"down": draft.squares.view(1, -1)}
        self.gate_up = draft.x.new_empty(draft.rows, 2 * draft.config.intermediate_size)
        self.update = torch.empty_like(draft.x)
        gates = draft.weights.gates
        self.projected = draft.x.new_empty(draft.rows, gates.shape[0] if gates is not None else 0)

    def steps(self) -> list[Step]:
        """All layers, the final norm, logits and candidates."""
        draft, layers = self.draft, self.draft.weights.layers
        following = [layer.input_norm for layer in layers[1:]] + [draft.weights.norm]
        steps: list[Step] = []
        for index, layer in enumerate(layers):
            steps += self._layer(index, layer)
            if draft.config.transfer is None:
                steps.append(Step("norm", partial(self._norm, following[index])))
            else:
                steps += self._injection(layer, following[index], last=index == len(layers) - 1)
        return [*steps, *self._candidates_of_head()]

    def _candidates_of_head(self) -> list[Step]:
        draft = self.draft
        top = partial(top_candidates, draft.logits, draft.candidate_ids, draft.keys, draft.block)
        return [Step("lm_head", self._logits), Step("candidates", top)]

    def _norm(self, weight: Tensor) -> None:
        rms_norm(self.draft.x, weight, self.draft.eps, self.draft.normed)

    def _layer(self, index: int, layer: PackedLayer) -> list[Step]:
        draft = self.draft
        return [
            Step("qkv", lambda: torch.mm(draft.normed, layer.qkv.T, out=draft.qkv)),
            Step("attention", partial(draft.attend, index, layer)),
            Step("o", lambda: draft.x.addmm_(draft.attended, layer.o.T)),
            Step("norm", partial(self._norm, layer.post_norm)),
            Step("gate_up", lambda: torch.mm(draft.normed, layer.gate_up.T, out=self.gate_up)),
            Step("silu", partial(silu_mul, self.gate_up, draft.activated)),
            Step("down", lambda: draft.x.addmm_(draft.activated, layer.down.T)),
        ]

    def _injection(self, layer: PackedLayer, following: Tensor, *, last: bool) -> list[Step]:
        draft = self.draft
        readout, write = layer.readout, layer.write
        assert readout is not None and write is not None
        target = draft.readout_of(last=last)
        read = layer.folded if draft.folded else readout
        assert read is not None
        reading = Step("readout", lambda: torch.mm(draft.x, read.T, out=target))
        if last and self._writes_at_once():
            return [
                reading,
                *self._messages(target, last=True, squares=draft.squares),
                self._last_write(write, following),
            ]
        return [
            reading,
            *self._messages(target, last=last),
            Step("write", lambda: torch.mm(draft.z, write.T, out=self.update)),
            self._write_and_norm(following, last=last),
        ]

    def _writes_at_once(self) -> bool:
        """Whether the last write and its norm are one product, which is planned for few rows of two-byte values."""
        return self.draft.rows <= WRITE_ROWS and self.draft.x.element_size() == 2

    def _last_write(self, write: Tensor, following: Tensor) -> Step:
        """The write, and the final norm but for its division, which does not change the order of a row's logits, in one product."""
        draft, nothing_shared = self.draft, Workspace(self.draft.x, self.draft.x)
        return Step("write", partial(
            linear, draft.z, write, draft.written, WRITE_PLAN, nothing_shared, squares=self.squares["down"],
            norm_width=draft.config.hidden_size, write=True, block=draft.block, residual=draft.x, gain=following, scaled=draft.normed,
        ))  # fmt: skip

    def _write_and_norm(self, following: Tensor, *, last: bool) -> Step:
        """Adds the injection's update. Of the last layer only the norm is read on; its state from before the write stays: the
        transition redoes that write.
        """
        draft, injected = self.draft, self.draft.written if last else self.draft.x
        finish = partial(
            write_and_norm, draft.x, self.update, following, draft.eps, draft.block, injected, draft.normed, draft.squares,
            self._rounded_normed(),
        )  # fmt: skip
        return Step("write_norm", finish)

    def _rounded_normed(self) -> tuple[Tensor, Tensor] | None:
        """Where the norm behind a write goes rounded as well: float8 [R, d] and float32 [R]."""
        return None

    def _messages(self, target: Tensor, *, last: bool, squares: Tensor | None = None) -> list[Step]:
        """Gated messages z of the readouts in `target`. squares: float32 [R], receives |x|^2."""
        draft, weights = self.draft, self.draft.weights
        gates = weights.gates
        assert gates is not None and weights.gate_bias is not None and weights.token_table is not None
        (count, rank), folded = gates.shape, draft.folded
        narrow = target[:, count : count + rank] if folded else target[:, :rank]
        message = partial(
            gate_projections, narrow, target[:, :count] if folded else self.projected, weights.gate_bias, weights.token_table,
            draft.anchor_ids, draft.z, draft.block, draft.receiver_gate if last else None, None if squares is None else draft.x, squares,
        )  # fmt: skip
        if folded:
            return [Step("message", message)]
        return [Step("gates", lambda: torch.mm(narrow, gates.T, out=self.projected)), Step("message", message)]

    def _logits(self) -> None:
        draft, head = self.draft, self.draft.weights.lm_head
        if head.dtype == torch.float32:
            torch.mm(draft.normed, head.T, out=draft.logits)
        else:
            torch.mm(draft.normed, head.T, out_dtype=torch.float32, out=draft.logits)
