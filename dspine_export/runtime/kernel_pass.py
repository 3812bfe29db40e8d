"""One draft pass and one context append as a list of launches over static buffers.

Nothing is allocated, nothing is read back: lengths, anchors and counts live on the device, so the list can be captured in a CUDA graph.
Matrix products are the vendor's (they reach the bandwidth at 16 rows already); everything between them is fused in `dspine_kernels`.
Symbols: N sequences, B block, d hidden, m message, K candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from dspine_kernels.attention import append_context, block_attention
from dspine_kernels.attention.block import partial_sizes
from dspine_kernels.injection import gated_messages
from dspine_kernels.rows import embed_block, rms_norm, silu_mul, write_and_norm
from dspine_kernels.topk import top_candidates
from dspine_kernels.topk.kernel import workspace_keys
from dspine_kernels.transition import lattice_walk, transition_scores
from dspine_kernels.transition.kernel import partial_size
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.runtime.packed_weights import PackedDrafter, PackedLayer

# Attention programs per launch (two a multiprocessor) and the fewest keys a program is worth; measured by tools/bench_draft.py.
TARGET_PROGRAMS = 264
MIN_STRETCH = 192


@dataclass(frozen=True)
class CacheView:
    """Keys and values [S, L, Hkv, C, D] and lengths int64 [S] of S slots."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Step:
    """One launch, or a few that belong together, and the stage it counts towards when a pass is taken apart."""

    stage: str
    run: Callable[[], object]


class DraftPass:
    """Buffers and launches of one batch size.

    Args:
        weights: the packed drafter. cache: the context cache it attends; capacity C bounds the work, lengths decide it.
        batch: N <= S sequences a pass drafts for; None: all S slots of the cache.

    Attributes:
        slots int64 [N]: the cache row of every sequence, row n at first; an input too. Rows may repeat.
        anchor_ids int64 [N], temperature float32 [N], uniforms float32 [N, B-1]: inputs, written by the caller before `launch`.
        tokens int64 [N, B-1], candidate_ids int64 [N*(B-1), K], scores float32 [N, B-1, K, K], q float32 [N, B-1, K]: results.
        steps: what `launch` runs, in order.
    """

    def __init__(
        self, config: DrafterConfig, weights: PackedDrafter, cache: CacheView, batch: int | None = None
    ) -> None:
        self.config, self.weights, self.cache = config, weights, cache
        self.batch, self.block = batch or cache.keys.shape[0], config.block_size
        self.rows, self.eps = self.batch * self.block, config.rms_norm_eps
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
        self.gate_up = like.new_empty(self.rows, 2 * config.intermediate_size)
        self.activated = like.new_empty(self.rows, config.intermediate_size)
        self.logits = torch.empty(self.rows, config.vocab_size, device=device)
        self.candidate_ids = torch.zeros(n * slots, k, dtype=torch.int64, device=device)
        self.keys = torch.empty(workspace_keys(n * slots, config.vocab_size, k), dtype=torch.int64, device=device)
        self.tokens = torch.zeros(n, slots, dtype=torch.int64, device=device)
        self._plan_attention()
        if config.transfer is not None:
            self._allocate_injection(k)
        self.steps = self._steps()

    def launch(self) -> None:
        """Queues the whole pass on the current stream."""
        for step in self.steps:
            step.run()

    def _plan_attention(self) -> None:
        config, capacity = self.config, self.cache.keys.shape[3]
        programs = max(1, TARGET_PROGRAMS // (self.batch * config.num_kv_heads))
        stretch = max(MIN_STRETCH, -(-capacity // programs))
        self.stretch = -(-stretch // 64) * 64
        self.splits = -(-capacity // self.stretch) + 1
        sizes = partial_sizes(
            self.batch, config.num_kv_heads, config.num_heads, config.head_dim, self.block, self.splits
        )
        device = self.cache.keys.device
        self.partial, self.stats = (torch.empty(size, device=device) for size in sizes)

    def _allocate_injection(self, k: int) -> None:
        transfer, like, slots = self.config.transfer, self.weights.embed_tokens, self.block - 1
        assert transfer is not None
        device = like.device
        self.readout = like.new_empty(self.rows, transfer.rank)
        self.projected = like.new_empty(self.rows, 3 * transfer.message_size)
        self.z = like.new_empty(self.rows, transfer.message_size)
        self.update = torch.empty_like(self.x)
        self.squares = torch.empty(self.rows, device=device)
        self.receiver_gate = torch.empty(self.rows, transfer.message_size, device=device)
        self.scores = torch.empty(self.batch, slots, k, k, device=device)
        self.q = torch.empty(self.batch, slots, k, device=device)
        size = partial_size(self.batch * slots, self.config.hidden_size, k)
        self.score_partials = torch.empty(size, device=device)
        pairs = self.batch * slots * k
        self.pair_z = like.new_empty(pairs, transfer.message_size)
        self.pair_update = like.new_empty(pairs, self.config.hidden_size)

    def _steps(self) -> list[Step]:
        layers, norm = self.weights.layers, self.weights.norm
        following = [layer.input_norm for layer in layers[1:]] + [norm]
        steps = [Step("embed", self._embed)]
        for index, layer in enumerate(layers):
            steps += self._layer(index, layer)
            if self.config.transfer is None:
                steps.append(Step("norm", partial(self._norm, following[index])))
            else:
                steps += self._injection(layer, following[index], last=index == len(layers) - 1)
        steps.append(Step("lm_head", self._logits))
        top = partial(top_candidates, self.logits, self.candidate_ids, self.keys, self.block)
        steps.append(Step("candidates", top))
        if self.config.transfer is None:
            return [*steps, Step("tokens", lambda: self.tokens.view(-1).copy_(self.candidate_ids[:, 0]))]
        return [*steps, Step("transition", self._score), Step("walk", self._walk)]

    def _embed(self) -> None:
        weights, first = self.weights, self.weights.layers[0].input_norm
        mask = self.config.mask_token_id
        embed_block(self.anchor_ids, weights.embed_tokens, mask, first, self.eps, self.block, self.x, self.normed)

    def _norm(self, weight: Tensor) -> None:
        rms_norm(self.x, weight, self.eps, self.normed)

    def _layer(self, index: int, layer: PackedLayer) -> list[Step]:
        return [
            Step("qkv", lambda: torch.mm(self.normed, layer.qkv.T, out=self.qkv)),
            Step("attention", partial(self._attend, index, layer)),
            Step("o", lambda: self.x.addmm_(self.attended, layer.o.T)),
            Step("norm", partial(self._norm, layer.post_norm)),
            Step("gate_up", lambda: torch.mm(self.normed, layer.gate_up.T, out=self.gate_up)),
            Step("silu", partial(silu_mul, self.gate_up, self.activated)),
            Step("down", lambda: self.x.addmm_(self.activated, layer.down.T)),
        ]

    def _attend(self, index: int, layer: PackedLayer) -> None:
        cache, weights = self.cache, self.weights
        block_attention(
            self.qkv, layer.q_norm, layer.k_norm, self.eps, weights.cos, weights.sin, cache.lengths,
            cache.keys[:, index], cache.values[:, index], self.attended, self.partial, self.stats,
            block=self.block, causal=self.config.is_causal, window=layer.window, stretch=self.stretch, splits=self.splits,
            slots=self.slots,
        )  # fmt: skip

    def _injection(self, layer: PackedLayer, following: Tensor, *, last: bool) -> list[Step]:
        weights, readout, write = self.weights, layer.readout, layer.write
        assert readout is not None and write is not None
        gates = weights.gates
        assert gates is not None and weights.gate_bias is not None and weights.token_table is not None
        message = partial(
            gated_messages, self.readout, self.projected, weights.gate_bias, weights.token_table, self.anchor_ids, self.z,
            self.block, self.receiver_gate if last else None,
        )  # fmt: skip
        # Of the last layer only the norm is read on; its state from before the write stays: the transition redoes that write.
        target = self.written if last else self.x
        finish = partial(
            write_and_norm, self.x, self.update, following, self.eps, self.block, target, self.normed, self.squares
        )
        return [
            Step("readout", lambda: torch.mm(self.x, readout.T, out=self.readout)),
            Step("gates", lambda: torch.mm(self.readout, gates.T, out=self.projected)),
            Step("message", message),
            Step("write", lambda: torch.mm(self.z, write.T, out=self.update)),
            Step("write_norm", finish),
        ]

    def _logits(self) -> None:
        head = self.weights.lm_head
        if head.dtype == torch.float32:
            torch.mm(self.normed, head.T, out=self.logits)
        else:
            torch.mm(self.normed, head.T, out_dtype=torch.float32, out=self.logits)

    def _score(self) -> None:
        weights = self.weights
        last = weights.layers[-1]
        assert last.write is not None and weights.token_table is not None
        transition_scores(
            self.x, self.squares, self.receiver_gate, self.anchor_ids, self._candidates(), weights.token_table, last.write,
            weights.norm, weights.lm_head, self.eps, self.scores, self.pair_z, self.pair_update, self.score_partials, self.block,
        )  # fmt: skip

    def _walk(self) -> None:
        lattice_walk(self.scores, self._candidates(), self.temperature, self.uniforms, self.tokens, self.q)

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
