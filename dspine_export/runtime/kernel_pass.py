"""One draft pass and one context append as a sequence of kernel launches over static buffers.

Nothing is allocated, nothing is read back: lengths, anchors and counts live on the device, so the whole sequence can be captured in a
CUDA graph. Symbols: N sequences, B block, d hidden, m message, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from dspine_kernels.attention import append_context, block_attention
from dspine_kernels.attention.block import partial_sizes
from dspine_kernels.injection import gated_messages
from dspine_kernels.linear import linear
from dspine_kernels.topk import top_candidates
from dspine_kernels.topk.kernel import workspace_keys
from dspine_kernels.transition import lattice_walk, transition_scores
from dspine_kernels.transition.kernel import partial_size
from torch import Tensor
from torch.nn import functional as F

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.runtime.packed_weights import PackedDrafter, PackedLayer

# From this many rows on a vendor GEMM beats the streaming kernel: the product is no longer bound by reading the weight.
VENDOR_GEMM_ROWS = 96
TARGET_PROGRAMS = 132
MIN_STRETCH = 64


@dataclass(frozen=True)
class CacheView:
    """Keys and values [N, L, Hkv, C, D] and lengths int64 [N]."""

    keys: Tensor
    values: Tensor
    lengths: Tensor


class DraftPass:
    """Buffers and launches of one batch size.

    Args:
        weights: the packed drafter. cache: the context cache it attends; capacity C bounds the work, lengths decide it.

    Attributes:
        anchor_ids int64 [N], temperature float32 [N], uniforms float32 [N, B-1]: inputs, written by the caller before `launch`.
        tokens int64 [N, B-1], candidate_ids int64 [N*(B-1), K], scores float32 [N, B-1, K, K], q float32 [N, B-1, K]: results.
    """

    def __init__(self, config: DrafterConfig, weights: PackedDrafter, cache: CacheView) -> None:
        self.config, self.weights, self.cache = config, weights, cache
        self.batch, self.block = cache.keys.shape[0], config.block_size
        self.rows = self.batch * self.block
        like = weights.embed_tokens
        n, slots, device = self.batch, config.block_size - 1, like.device
        k = config.transfer.top_k if config.transfer is not None else 1
        heads, dim = config.num_heads, config.head_dim
        self.anchor_ids = torch.zeros(n, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(n, device=device)
        self.uniforms = torch.zeros(n, slots, device=device)
        self.ids = torch.full((n, self.block), config.mask_token_id, dtype=torch.int64, device=device)
        self.hidden = [like.new_empty(self.rows, config.hidden_size) for _ in range(3)]
        self.qkv = like.new_empty(self.rows, (heads + 2 * config.num_kv_heads) * dim)
        self.attended = like.new_empty(self.rows, heads * dim)
        self.activated = like.new_empty(self.rows, config.intermediate_size)
        self.logits = torch.empty(self.rows, config.vocab_size, device=device)
        self.candidate_ids = torch.zeros(n * slots, k, dtype=torch.int64, device=device)
        self.keys = torch.empty(workspace_keys(n * slots, config.vocab_size, k), dtype=torch.int64, device=device)
        self._plan_attention()
        self.tokens = torch.zeros(n, slots, dtype=torch.int64, device=device)
        if config.transfer is not None:
            self._allocate_injection(k)

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
        self.z = like.new_empty(self.rows, transfer.message_size)
        self.row_sums = torch.empty(self.rows, device=device)
        self.receiver_gate = torch.empty(self.rows, transfer.message_size, device=device)
        self.scores = torch.empty(self.batch, slots, k, k, device=device)
        self.q = torch.empty(self.batch, slots, k, device=device)
        size = partial_size(self.batch * slots, self.config.hidden_size, k)
        self.score_partials = torch.empty(size, device=device)

    def launch(self) -> None:
        """Queues the whole pass on the current stream."""
        weights, config = self.weights, self.config
        x, other, pre = self.hidden
        self.ids[:, 0] = self.anchor_ids
        torch.index_select(weights.embed_tokens, 0, self.ids.view(-1), out=x)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            self._attention(index, layer, x, other)
            x, other = other, x
            out = pre if index == last and config.transfer is not None else other
            self._mlp(layer, x, out)
            if config.transfer is None:
                x, other = out, x
            elif index == last:
                self._inject(layer, pre, x, self.receiver_gate)
            else:
                self._inject(layer, other, x, None)
        self._logits(x)
        top_candidates(self.logits, self.candidate_ids, self.keys, self.block)
        if config.transfer is None:
            self.tokens.view(-1).copy_(self.candidate_ids[:, 0])
        else:
            self._decode(pre)

    def _attention(self, index: int, layer: PackedLayer, x: Tensor, out: Tensor) -> None:
        config, cache, weights = self.config, self.cache, self.weights
        self._product(x, layer.qkv, self.qkv, norm=layer.input_norm)
        block_attention(
            self.qkv, layer.q_norm, layer.k_norm, config.rms_norm_eps, weights.cos, weights.sin, cache.lengths,
            cache.keys[:, index], cache.values[:, index], self.attended, self.partial, self.stats,
            block=self.block, causal=config.is_causal, window=layer.window, stretch=self.stretch, splits=self.splits,
        )  # fmt: skip
        self._product(self.attended, layer.o, out, residual=x)

    def _mlp(self, layer: PackedLayer, x: Tensor, out: Tensor) -> None:
        if self.rows < VENDOR_GEMM_ROWS:
            eps = self.config.rms_norm_eps
            linear(x, layer.gate_up, self.activated, norm_weight=layer.post_norm, eps=eps, glu=True)
        else:
            normed = F.rms_norm(x, (x.shape[1],), layer.post_norm, self.config.rms_norm_eps)
            gate, up = torch.mm(normed, layer.gate_up.T).chunk(2, dim=-1)
            torch.mul(F.silu(gate), up, out=self.activated)
        self._product(self.activated, layer.down, out, residual=x)

    def _inject(self, layer: PackedLayer, hidden: Tensor, out: Tensor, receiver_gate: Tensor | None) -> None:
        weights = self.weights
        assert layer.readout is not None and layer.write is not None
        assert weights.gates is not None and weights.gate_bias is not None and weights.token_table is not None
        linear(hidden, layer.readout, self.readout, row_sums=self.row_sums)
        gated_messages(
            self.readout,
            weights.gates,
            weights.gate_bias,
            weights.token_table,
            self.anchor_ids,
            self.z,
            self.block,
            receiver_gate,
        )
        linear(self.z, layer.write, out, residual=hidden, row_sums=self.row_sums, write_block=self.block)

    def _product(
        self, x: Tensor, weight: Tensor, out: Tensor, *, norm: Tensor | None = None, residual: Tensor | None = None
    ) -> None:
        if self.rows < VENDOR_GEMM_ROWS:
            linear(x, weight, out, norm_weight=norm, eps=self.config.rms_norm_eps, residual=residual)
            return
        if norm is not None:
            x = F.rms_norm(x, (x.shape[1],), norm, self.config.rms_norm_eps)
        if residual is None:
            torch.mm(x, weight.T, out=out)
        else:
            torch.addmm(residual, x, weight.T, out=out)

    def _logits(self, x: Tensor) -> None:
        weights, eps = self.weights, self.config.rms_norm_eps
        if self.rows < VENDOR_GEMM_ROWS or x.dtype == torch.float32:
            linear(x, weights.lm_head, self.logits, norm_weight=weights.norm, eps=eps)
        else:
            normed = F.rms_norm(x, (x.shape[1],), weights.norm, eps)
            torch.mm(normed, weights.lm_head.T, out_dtype=torch.float32, out=self.logits)

    def _decode(self, pre: Tensor) -> None:
        weights, slots = self.weights, self.block - 1
        last = weights.layers[-1]
        assert last.write is not None and weights.token_table is not None
        candidates = self.candidate_ids.view(self.batch, slots, -1)
        transition_scores(
            pre, self.row_sums, self.receiver_gate, self.anchor_ids, candidates, weights.token_table, last.write, weights.norm,
            weights.lm_head, self.config.rms_norm_eps, self.scores, self.score_partials, self.block,
        )  # fmt: skip
        lattice_walk(self.scores, candidates, self.temperature, self.uniforms, self.tokens, self.q)


class ContextPass:
    """Projects T committed rows per sequence and appends counts[n] of them; advances the lengths on the device.

    Attributes:
        target_hidden: [N, T, A*d] and counts: int64 [N], inputs written by the caller before `launch`.
    """

    def __init__(self, config: DrafterConfig, weights: PackedDrafter, cache: CacheView, tokens: int) -> None:
        self.config, self.weights, self.cache = config, weights, cache
        batch, like = cache.keys.shape[0], weights.embed_tokens
        self.target_hidden = like.new_zeros(batch, tokens, config.num_taps * config.hidden_size)
        self.counts = torch.zeros(batch, dtype=torch.int64, device=like.device)
        self.context = like.new_empty(batch * tokens, config.hidden_size)
        self.rows = like.new_empty(batch, tokens, 2 * config.num_kv_heads * config.head_dim)

    def launch(self) -> None:
        """Queues the append on the current stream."""
        weights, config, cache = self.weights, self.config, self.cache
        eps = config.rms_norm_eps
        flat = self.target_hidden.flatten(0, 1)
        rows = self.rows.flatten(0, 1)
        if flat.shape[0] < VENDOR_GEMM_ROWS:
            linear(flat, weights.fc, self.context)
        else:
            torch.mm(flat, weights.fc.T, out=self.context)
        normed = F.rms_norm(self.context, (config.hidden_size,), weights.hidden_norm, eps)
        for index, layer in enumerate(weights.layers):
            if rows.shape[0] < VENDOR_GEMM_ROWS:
                linear(normed, layer.context, rows)
            else:
                torch.mm(normed, layer.context.T, out=rows)
            append_context(
                self.rows, layer.k_norm, eps, weights.cos, weights.sin, cache.lengths, self.counts,
                cache.keys[:, index], cache.values[:, index],
            )  # fmt: skip
        cache.lengths.add_(self.counts)
