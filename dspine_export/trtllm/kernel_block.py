"""The draft pass of `runtime.kernel_pass` behind the draft-model hooks: our kernels on TensorRT-LLM's cache, on the current stream.

Of the cache only committed columns are read. Buffers are made anew for every pass: under a CUDA graph they come from the graph's own
pool, which passes of other batch sizes share, and outside of one torch's allocator has them at hand.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.model.drafter import Drafter
from dspine_export.model.drafter_model import DrafterModel
from dspine_export.runtime.kernel_pass import CacheView, DraftPass, Step
from dspine_export.runtime.packed_weights import PackedDrafter, pack, with_positions
from dspine_export.trtllm.block_executors import last_block
from dspine_export.trtllm.chain_logits import chain_logits
from dspine_export.trtllm.context_part import keep_context_part
from dspine_export.trtllm.worker_cache import WorkerContext

_AFTER_HIDDEN = (
    "lm_head",
    "candidates",
    "tokens",
)  # stages that TensorRT-LLM's own head replaces for a drafter without injection


class KernelBlock:
    """The kernels. A DSpine drafter's head, candidates, transition cache and walk are part of the pass: the target's head is not asked.

    Args:
        weights: packed; the rotation tables grow with the worker's cache, in the first pass that sees it.
    """

    def __init__(self, config: DrafterConfig, weights: PackedDrafter) -> None:
        self.config, self.weights = config, weights
        self.own_logits = config.is_dspine
        self._last: DraftPass | None = None

    def draft(self, anchor_ids: Tensor, context: WorkerContext, lengths: Tensor) -> Tensor:
        batch, heads, columns, dim = context.shape
        positions = columns + self.config.block_size
        if positions > len(self.weights.cos):
            self.weights = with_positions(self.weights, self.config, positions)
        # One layer's buffers serve all layers: each is filled right before its attention.
        keys, values = (context.keys[0].new_empty(batch, 1, heads, columns, dim) for _ in range(2))
        shape = (-1, self.config.num_layers, -1, -1, -1)
        work = DraftPass(self.config, self.weights, CacheView(keys.expand(shape), values.expand(shape), lengths))
        work.anchor_ids.copy_(anchor_ids)
        layer = 0
        for step in self._steps(work):
            if step.stage == "attention":
                context.copy(layer, lengths, keys[:, 0], values[:, 0])
                layer += 1
            step.run()
        self._last = work
        return work.normed.view(batch, self.config.block_size, -1)

    def refine(self, base_logits: Tensor) -> Tensor:
        work, slots = last_block(self._last), slice(0, base_logits.shape[1])
        candidates = work.candidate_ids.view(work.batch, work.block - 1, -1)[:, slots]
        return chain_logits(work.scores[:, slots], candidates, work.q[:, slots].argmax(dim=-1), base_logits.shape[-1])

    def _steps(self, work: DraftPass) -> Iterator[Step]:
        return (step for step in work.steps if self.own_logits or step.stage not in _AFTER_HIDDEN)


def open_kernels(drafter: Drafter) -> tuple[DrafterModel, KernelBlock]:
    """The executor, and the drafter's network cut down to what context rows need; weights are shared between the two, not doubled."""
    config, network = drafter.config, drafter.model
    weights = pack(drafter, config.max_position_embeddings + config.block_size)
    for layer, packed in zip(network.layers, weights.layers, strict=True):
        keys, values = packed.context.chunk(2)
        for name, rows in (("k_proj", keys), ("v_proj", values)):
            layer.get_submodule(f"self_attn.{name}").weight = nn.Parameter(rows, requires_grad=False)
    return keep_context_part(network), KernelBlock(config, weights)
