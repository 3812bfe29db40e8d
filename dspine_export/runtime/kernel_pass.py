"""One draft pass and one context append as a list of launches over static buffers.

Nothing is allocated, nothing is read back: lengths, anchors and counts live on the device, so the list can be captured in a CUDA graph.
Few rows go through our own products with everything else in their epilogues, many through the vendor's.
Symbols: N sequences, B block, d hidden, m message, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dspine_kernels.attention import append_context, block_attention
from dspine_kernels.attention.block import partial_sizes
from dspine_kernels.linear import FEW_ROWS
from dspine_kernels.rows import embed_block, rms_norm
from dspine_kernels.topk.kernel import workspace_keys
from dspine_kernels.transition import TransitionScratch, transition_scores, walk_choices
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.runtime.fused_layer import FusedLayers
from dspine_export.runtime.injection_form import Form, form_for
from dspine_export.runtime.merged_layer import MergedFusedLayers, MergedVendorLayers
from dspine_export.runtime.packed_weights import PackedDrafter, PackedLayer
from dspine_export.runtime.pass_step import Step
from dspine_export.runtime.vendor_layer import VendorLayers

__all__ = ["CacheView", "ContextPass", "DraftPass", "Step"]

# Attention programs per launch (two a multiprocessor, less for a single sequence, whose partial results cost more than they hide);
# measured by tools/bench_draft.py.
TARGET_PROGRAMS = 264


@dataclass(frozen=True)
class CacheView:
    """Keys and values [S, L, Hkv, C, D] and lengths int64 [S] of S slots."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


class DraftPass:
    """Buffers and launches of one batch size.

    Args:
        weights: the packed drafter. cache: the context cache it attends; capacity C bounds the work, lengths decide it.
        batch: N <= S sequences a pass drafts for; None: all S slots of the cache.
        fused: our own products or the vendor's; None: by the number of rows.
        form: how injections are run; None: by the number of rows.

    Attributes:
        slots int64 [N]: the cache row of every sequence, row n at first; an input too. Rows may repeat.
        anchor_ids int64 [N], temperature float32 [N], uniforms float32 [N, B-1]: inputs, written by the caller before `launch`.
        tokens int64 [N, B-1], candidate_ids int64 [N*(B-1), K], scores float32 [N, B-1, K, K], q float32 [N, B-1, K]: results.
        steps: what `launch` runs, in order.
    """

    def __init__(
        self,
        config: DrafterConfig,
        weights: PackedDrafter,
        cache: CacheView,
        batch: int | None = None,
        *,
        fused: bool | None = None,
        form: Form | None = None,
    ) -> None:
        self.config, self.weights, self.cache = config, weights, cache
        self.batch, self.block = batch or cache.keys.shape[0], config.block_size
        self.rows, self.eps = self.batch * self.block, config.rms_norm_eps
        self.form: Form = form or form_for(self.rows, weights)
        self.folded = self.form != "plain"
        like = weights.embed_tokens
        n, slots, device = self.batch, config.block_size - 1, like.device
        k = config.transfer.top_k if config.transfer is not None else 1
        self.slots = torch.arange(n, device=device)
        self.anchor_ids = torch.zeros(n, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(n, device=device)
        self.uniforms = torch.zeros(n, slots, device=device)
        self.x, self.written, self.normed = (like.new_empty(self.rows, config.hidden_size) for _ in range(3))
        self.qkv = like.new_empty(self.rows, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)
        self.attended = like.new_empty(self.rows, config.num_heads * config.head_dim)
        self.activated = like.new_empty(self.rows, config.intermediate_size)
        self.logits = torch.empty(self.rows, config.vocab_size, device=device)
        self.candidate_ids = torch.zeros(n * slots, k, dtype=torch.int64, device=device)
        self.keys = torch.empty(workspace_keys(n * slots, config.vocab_size), dtype=torch.int64, device=device)
        self.tokens = torch.zeros(n, slots, dtype=torch.int64, device=device)
        self.squares = torch.empty(self.rows, device=device)
        self._plan_attention()
        if fused is None:
            fused = self.rows <= FEW_ROWS and like.element_size() == 2
        if config.transfer is not None:
            self._allocate_injection(k, beside=self.qkv.shape[1] if self.form == "merged" and not fused else 0)
        self.layers = self._layers(fused=fused)
        self.steps = self._steps()

    def launch(self) -> None:
        """Queues the whole pass on the current stream."""
        for step in self.steps:
            step.run()

    def _layers(self, *, fused: bool) -> FusedLayers | VendorLayers:
        if self.form == "merged":
            return MergedFusedLayers(self) if fused else MergedVendorLayers(self)
        return FusedLayers(self) if fused else VendorLayers(self)

    def _plan_attention(self) -> None:
        config, heads = self.config, self.batch * self.config.num_kv_heads
        target = TARGET_PROGRAMS if self.batch > 1 or self.cache.keys.shape[3] > 8192 else TARGET_PROGRAMS // 4
        self.splits = max(1, min(target // heads, -(-self.cache.keys.shape[3] // 64)))
        sizes = partial_sizes(
            self.batch, config.num_kv_heads, config.num_heads, config.head_dim, self.block, self.splits
        )
        device = self.cache.keys.device
        self.partial, self.stats = (torch.empty(size, device=device) for size in sizes)

    def _allocate_injection(self, k: int, beside: int) -> None:
        transfer, like, slots = self.config.transfer, self.weights.embed_tokens, self.block - 1
        assert transfer is not None
        device, m = like.device, transfer.message_size
        projections = 3 * m if self.folded else 0
        self.readout = like.new_empty(self.rows, projections + transfer.rank + beside)
        self.last_readout = like.new_empty(self.rows, projections + transfer.rank + m)
        self.z = like.new_empty(self.rows, m)
        self.receiver_gate = torch.empty(self.rows, m, device=device)
        self.scores = torch.empty(self.batch, slots, k, k, device=device)
        self.q = torch.empty(self.batch, slots, k, device=device)
        self.scratch = TransitionScratch.of(self.batch * slots, k, m, like)

    def readout_of(self, *, last: bool) -> Tensor:
        """The readouts [R, r] of a layer; folded projections [R, 3m] lie before.

        Behind them are the last layer's Wr^T x [R, m], and, merged by the vendor's products, the other layers' products with the next
        layer's projections.
        """
        return self.last_readout if last else self.readout

    def attend(self, index: int, layer: PackedLayer) -> None:
        """Attention of a layer, from qkv into attended."""
        cache, weights = self.cache, self.weights
        block_attention(
            self.qkv, layer.q_norm, layer.k_norm, self.eps, weights.cos, weights.sin, cache.lengths,
            cache.keys[:, index], cache.values[:, index], self.attended, self.partial, self.stats,
            block=self.block, causal=self.config.is_causal, window=layer.window, splits=self.splits, slots=self.slots,
        )  # fmt: skip

    def _steps(self) -> list[Step]:
        steps = [Step("embed", self._embed), *self.layers.steps()]
        if self.config.transfer is None:
            return [*steps, Step("tokens", lambda: self.tokens.view(-1).copy_(self.candidate_ids[:, 0]))]
        return [*steps, Step("transition", self._score), Step("walk", self._walk)]

    def _embed(self) -> None:
        weights, first = self.weights, self.weights.layers[0].input_norm
        mask = self.config.mask_token_id
        embed_block(self.anchor_ids, weights.embed_tokens, mask, first, self.eps, self.block, self.x, self.normed)

    def _score(self) -> None:
        weights, transfer = self.weights, self.config.transfer
        assert transfer is not None and weights.token_table is not None
        assert weights.score_table is not None and weights.gram is not None
        transition_scores(
            self.x, self.layers.squares["down"], self.last_readout[:, -transfer.message_size :], self.receiver_gate, self.anchor_ids,
            self._candidates(), weights.token_table, weights.score_table, weights.gram, weights.norm, weights.lm_head, self.eps,
            self.temperature, self.uniforms, self.scores, self.scratch, self.block,
        )  # fmt: skip

    def _walk(self) -> None:
        walk_choices(self.scratch.choices, self.scratch.soft, self._candidates(), self.temperature, self.tokens, self.q)

    def _candidates(self) -> Tensor:
        return self.candidate_ids.view(self.batch, self.block - 1, -1)


class ContextPass:
    """Projects T committed rows per sequence and appends counts[n] of them; advances the lengths on the device.

    Attributes:
        target_hidden: [N, T, A*d], counts: int64 [N] and slots: int64 [N] (the cache row of every sequence, row n at first; rows may
            repeat where the counts are 0), inputs written by the caller before `launch`. N is `batch`, or all S slots of the cache.
    """

    def __init__(
        self, config: DrafterConfig, weights: PackedDrafter, cache: CacheView, tokens: int, batch: int | None = None
    ) -> None:
        self.config, self.weights, self.cache = config, weights, cache
        batch, like = batch or cache.keys.shape[0], weights.embed_tokens
        self.slots = torch.arange(batch, device=like.device)
        self.target_hidden = like.new_zeros(batch, tokens, config.num_taps * config.hidden_size)
        self.counts = torch.zeros(batch, dtype=torch.int64, device=like.device)
        self.context = like.new_empty(batch * tokens, config.hidden_size)
        self.normed = torch.empty_like(self.context)
        self.rows = like.new_empty(batch, tokens, 2 * config.num_kv_heads * config.head_dim)

    def launch(self) -> None:
        """Queues the append on the current stream."""
        weights, cache, eps = self.weights, self.cache, self.config.rms_norm_eps
        torch.mm(self.target_hidden.flatten(0, 1), weights.fc.T, out=self.context)
        rms_norm(self.context, weights.hidden_norm, eps, self.normed)
        for index, layer in enumerate(weights.layers):
            torch.mm(self.normed, layer.context.T, out=self.rows.flatten(0, 1))
            append_context(
                self.rows, layer.k_norm, eps, weights.cos, weights.sin, cache.lengths, self.counts,
                cache.keys[:, index], cache.values[:, index], self.slots,
            )  # fmt: skip
        cache.lengths.index_add_(0, self.slots, self.counts)
