"""A decoder layer of few rows: our products, everything between them in their epilogues.

The kernel that writes x leaves x * gain of the norm that follows, and sums of squares; the kernel that reads it scales its result. So no
norm, no SwiGLU and no write of the injection is a launch of its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from dspine_kernels.injection import gate_projections, gated_messages
from dspine_kernels.linear import Plan, Workspace, linear, plan_for
from dspine_kernels.rows import rms_norm
from dspine_kernels.topk import select_candidates
from torch import Tensor

from dspine_export.runtime.float8 import Scales
from dspine_export.runtime.packed_weights import PackedLayer
from dspine_export.runtime.pass_step import Step

if TYPE_CHECKING:
    from dspine_export.runtime.kernel_pass import DraftPass


class FusedLayers:
    """Plans, scratch and launches. squares: by product, float32 [tiles, R], parts of the sums of squares of what it wrote last.

    Args:
        scales: of the weights in float8, which are widened in registers; activations are not rounded.
        head: ranks candidates [V, d]; None: the drafter's own.
    """

    def __init__(self, draft: DraftPass, scales: Scales | None = None, head: Tensor | None = None) -> None:
        self.draft, self._scales = draft, scales or {}
        self._head = draft.weights.lm_head if head is None else head
        config, rows, layer = draft.config, draft.rows, draft.weights.layers[0]
        size = draft.x.element_size()
        attended, qkv, plan = draft.attended.shape[1], draft.qkv.shape[1], partial(plan_for, rows, x_bytes=size)
        layers_size, head_size = layer.qkv.element_size(), self._head.element_size()
        self.plans = {
            "qkv": plan(qkv, config.hidden_size, layers_size),
            "o": plan(config.hidden_size, attended, layers_size),
            "gate_up": plan(config.intermediate_size, config.hidden_size, layers_size, pair=True),
            "down": plan(config.hidden_size, config.intermediate_size, layers_size),
            "lm_head": plan(config.vocab_size, config.hidden_size, head_size),
        }
        columns = {"qkv": qkv, "gate_up": config.intermediate_size, "lm_head": config.vocab_size}
        if config.transfer is not None:
            rank, message = config.transfer.rank, config.transfer.message_size
            read = rank + 3 * message if draft.folded else rank
            middle = draft.readout_of(last=False).shape[1]
            self.plans["readout"] = plan(middle, config.hidden_size, size)
            self.plans["last_readout"] = plan(read + message, config.hidden_size, size)
            self.plans["write"] = plan(config.hidden_size, message, size)
            columns |= {"readout": middle, "last_readout": read + message}
        wide = [(plan, rows, columns.get(name, config.hidden_size)) for name, plan in self.plans.items()]
        self.workspace = Workspace.for_plans(wide, layer.qkv.device)
        self.squares = {
            name: draft.squares.new_empty(plan.tiles(columns.get(name, config.hidden_size)), rows)
            for name, plan in self.plans.items()
            if name not in ("qkv", "gate_up", "lm_head")
        }

    def steps(self) -> list[Step]:
        """All layers, the final norm, logits and candidates."""
        draft, layers = self.draft, self.draft.weights.layers
        following = [layer.input_norm for layer in layers[1:]] + [draft.weights.norm]
        steps: list[Step] = []
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            steps += self._layer(index, layer, following[index])
            if draft.config.transfer is not None:
                steps += self._injection(layer, following[index], last=last)
        if draft.config.transfer is None:  # a runtime may take these rows to its own head
            steps.append(Step("norm", partial(rms_norm, draft.x, draft.weights.norm, draft.eps, draft.normed)))
        return [*steps, *self._candidates_of_head()]

    def _candidates_of_head(self) -> list[Step]:
        return [Step("lm_head", self._logits), Step("candidates", self._candidates)]

    def _linear(
        self, name: str, x: Tensor, weight: Tensor, out: Tensor, workspace: Workspace | None = None, **epilogue: Any
    ) -> None:
        plan: Plan = self.plans[name]
        width, eps, scales = self.draft.config.hidden_size, self.draft.eps, self._scales.get(weight.data_ptr())
        linear(x, weight, out, plan, workspace or self.workspace, norm_width=width, eps=eps, scales=scales, **epilogue)

    def _layer(self, index: int, layer: PackedLayer, following: Tensor) -> list[Step]:
        draft = self.draft
        entering = None if index == 0 else self.squares["down" if draft.config.transfer is None else "write"]
        step = partial(self._linear, residual=draft.x, scaled=draft.normed)
        return [
            Step("qkv", lambda: self._linear("qkv", draft.normed, layer.qkv, draft.qkv, squares=entering)),
            Step("attention", partial(draft.attend, index, layer)),
            Step("o", lambda: step("o", draft.attended, layer.o, draft.x, gain=layer.post_norm, squares_out=self.squares["o"])),
            Step(
                "gate_up",
                lambda: self._linear("gate_up", draft.normed, layer.gate_up, draft.activated, squares=self.squares["o"], pair=True),
            ),
            Step("down", lambda: step("down", draft.activated, layer.down, draft.x, gain=following, squares_out=self.squares["down"])),
        ]  # fmt: skip

    def _injection(self, layer: PackedLayer, following: Tensor, *, last: bool) -> list[Step]:
        draft, name = self.draft, "last_readout" if last else "readout"
        write, read = layer.write, layer.folded if draft.folded else layer.readout
        assert read is not None and write is not None
        assert draft.config.transfer is not None
        target, rank = draft.readout_of(last=last), draft.config.transfer.rank
        squared = None if draft.folded else self.squares[name]
        # Of the last layer only the norm is read on; its state from before the write stays: the transition redoes that write.
        finish = partial(
            self._linear, "write", draft.z, write, draft.written if last else draft.x, residual=draft.x, squares=self.squares["down"],
            write=True, block=draft.block, gain=following, scaled=draft.normed, squares_out=self.squares["write"],
        )  # fmt: skip
        return [
            Step(
                "readout", lambda: self._linear(name, draft.x, read, target, squares_out=squared, squares_columns=rank)
            ),
            self._message(target, last=last),
            Step("write", finish),
        ]

    def _message(self, target: Tensor, *, last: bool) -> Step:
        """Gated messages z of the readouts in `target`."""
        draft, weights, name = self.draft, self.draft.weights, "last_readout" if last else "readout"
        gates, bias, table = weights.gates, weights.gate_bias, weights.token_table
        assert gates is not None and bias is not None and table is not None
        known = (bias, table, draft.anchor_ids, draft.z, draft.block, draft.receiver_gate if last else None)
        if not draft.folded:
            return Step("message", partial(gated_messages, target, self.squares[name], gates, *known))
        count, rank = gates.shape
        return Step("message", partial(gate_projections, target[:, count : count + rank], target[:, :count], *known))

    def _logits(self) -> None:
        draft = self.draft
        squares = None if draft.config.transfer is None else self.squares["write"]
        self._linear(
            "lm_head",
            draft.normed,
            self._head,
            draft.logits,
            squares=squares,
            keys=draft.keys,
            block=draft.block,
        )

    def _candidates(self) -> None:
        draft = self.draft
        select_candidates(draft.logits, draft.candidate_ids, draft.keys, self.plans["lm_head"].weight_rows, draft.block)
