"""The drafter's layers as a list of launches over static buffers and vLLM's paged cache, up to the last layer's injection.

The layers are those of `runtime.fused_layer`, `runtime.vendor_layer` and, in float8, `runtime.rounded_layer`. vLLM's DFlash stores the
block's own keys and values before it attends; nothing reads them later (every block is computed anew, and committed rows come from the
target's states), so here they stay in registers. Symbols: N requests, B block, d hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from dspine_kernels.attention import block_attention
from dspine_kernels.attention.block import partial_sizes
from dspine_kernels.rows import embed_block
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig, TransferConfig
from dspine_export.runtime.float8 import RoundedRows, Scales
from dspine_export.runtime.fused_layer import FusedLayers
from dspine_export.runtime.kernel_pass import TARGET_PROGRAMS
from dspine_export.runtime.packed_weights import PackedDrafter, PackedLayer
from dspine_export.runtime.pass_step import Step
from dspine_export.runtime.rounded_layer import RoundedLayers
from dspine_export.runtime.vendor_layer import VendorLayers

MOST_STATIC_ROWS = 1024  # passes of more rows, rare and slow anyway, allocate when they run
LONG_CONTEXT = 8192  # from here on even a single request is worth all programs


@dataclass(frozen=True)
class LayerContext:
    """One layer of vLLM's cache: keys, values [P, Hkv, page, D] and the pages int32 [N, most pages] of every request."""

    keys: Tensor
    values: Tensor
    pages: Tensor


@dataclass(frozen=True)
class Geometry:
    """What every pass of an engine shares. block: rows a request; longest: positions a request can reach; few: rows of our products.

    scales: of the layers' matrices where those are float8.
    """

    config: DrafterConfig
    weights: PackedDrafter
    block: int
    longest: int
    few: int
    scales: Scales = field(default_factory=dict)

    @property
    def transfer(self) -> TransferConfig:
        assert self.config.transfer is not None
        return self.config.transfer

    def widths(self) -> dict[str, int]:
        """Columns of the buffers by name."""
        config, transfer = self.config, self.transfer
        heads = config.num_heads * config.head_dim
        return {
            "x": config.hidden_size, "normed": config.hidden_size, "qkv": heads + 2 * config.num_kv_heads * config.head_dim,
            "attended": heads, "activated": config.intermediate_size, "readout": 3 * transfer.message_size + transfer.rank,
            "z": transfer.message_size,
        }  # fmt: skip


class Buffers:
    """Buffers of `rows` rows; passes of fewer rows take views. The graphs of an engine run one after another and may share them."""

    def __init__(self, geometry: Geometry, rows: int) -> None:
        like = geometry.weights.embed_tokens
        self.rows, self.geometry = rows, geometry
        self.named = {name: like.new_empty(rows, width) for name, width in geometry.widths().items()}
        vendor = rows if rows > geometry.few else 0
        self.gate_up = like.new_empty(vendor, 2 * geometry.config.intermediate_size)
        self.update = like.new_empty(vendor, geometry.config.hidden_size)
        names = ("normed", "attended", "activated") if vendor and geometry.scales else ()
        self.rounded = {name: RoundedRows.empty(rows, self.named[name].shape[1], like.device) for name in names}


class _Few(FusedLayers):
    """Few rows: our products, everything else in their epilogues."""

    def steps(self) -> list[Step]:
        """All layers; the last one's state is left before its injection."""
        weights = self.draft.weights
        following = [layer.input_norm for layer in weights.layers[1:]]
        steps: list[Step] = []
        for index, layer in enumerate(weights.layers[:-1]):
            steps += self._layer(index, layer, following[index])
            steps += self._injection(layer, following[index], last=False)
        return steps + self._layer(len(weights.layers) - 1, weights.layers[-1], weights.norm)


class _Many(VendorLayers):
    """Many rows: the vendor's products."""

    def steps(self) -> list[Step]:
        """All layers; the last one's state is left before its injection."""
        weights = self.draft.weights
        steps: list[Step] = []
        for index, layer in enumerate(weights.layers[:-1]):
            steps += self._layer(index, layer)
            steps += self._injection(layer, weights.layers[index + 1].input_norm, last=False)
        return steps + self._layer(len(weights.layers) - 1, weights.layers[-1])


class _ManyRounded(RoundedLayers, _Many):
    """Many rows in float8."""

    def steps(self) -> list[Step]:
        """All layers; the last one's state is left before its injection."""
        return [self.first_step(), *super().steps(), *self.add_steps()]


class BackbonePass:
    """Launches for N requests, over the first rows of `buffers`.

    Attributes:
        x [N*B, d]: the result. anchor_ids int64 [N]: the blocks' first tokens, once a pass was launched.
        sums: float32 [T, N*B], parts of the sums of squares of x; none where the vendor's products made it.
    """

    def __init__(self, geometry: Geometry, buffers: Buffers, batch: int) -> None:
        config, self.weights, self.block = geometry.config, geometry.weights, geometry.block
        self.config, self.batch, self.rows = config, batch, batch * geometry.block
        self.eps, self.folded, device = config.rms_norm_eps, True, buffers.named["x"].device
        views = {name: buffer[: self.rows] for name, buffer in buffers.named.items()}
        self.x, self.normed, self.qkv, self.attended = (views[name] for name in ("x", "normed", "qkv", "attended"))
        self.activated, self.readout, self.z = (views[name] for name in ("activated", "readout", "z"))
        self.anchor_ids = torch.zeros(batch, dtype=torch.int64, device=device)
        self.squares = torch.empty(self.rows, device=device)
        self._no_context = torch.zeros(batch, dtype=torch.int64, device=device)
        self._no_keys = self.x.new_zeros(batch, config.num_kv_heads, 1, config.head_dim)
        self._plan_attention(geometry.longest)
        self._positions = self._no_context
        self._contexts: list[LayerContext] | None = None
        self.sums: Tensor | None = None
        draft: Any = self  # what the layers ask of a `runtime.kernel_pass.DraftPass`
        if self.rows <= geometry.few:
            few = _Few(draft, geometry.scales)
            self._steps, self.sums = few.steps(), few.squares["down"]
        else:
            rounded = {name: rows.first(self.rows) for name, rows in buffers.rounded.items()}
            many = _ManyRounded(draft, geometry.scales, rounded) if geometry.scales else _Many(draft)
            many.gate_up, many.update = buffers.gate_up[: self.rows], buffers.update[: self.rows]
            self._steps = many.steps()

    def launch(self, input_ids: Tensor, positions: Tensor, contexts: list[LayerContext] | None) -> Tensor:
        """Queues all layers.

        Args:
            input_ids: integers [N*B], positions: int64 [N*B]. An anchor's position is the length of its request's context.
            contexts: by layer; none while vLLM only measures memory, before there is a cache.

        Returns:
            x.
        """
        self._positions, self._contexts = positions[:: self.block], contexts
        self.anchor_ids.copy_(input_ids[:: self.block])
        weights = self.weights
        embed_block(input_ids, weights.embed_tokens, 0, weights.layers[0].input_norm, self.eps, 1, self.x, self.normed)
        for step in self._steps:
            step.run()
        return self.x

    def readout_of(self, *, last: bool) -> Tensor:
        """Projections and readouts [R, 3m + r]; the last layer's are not this pass's."""
        assert not last
        return self.readout

    def attend(self, index: int, layer: PackedLayer) -> None:
        """Attention of a layer, from qkv into attended."""
        weights = self.weights
        pages: Tensor | None = None
        lengths, keys, values = self._no_context, self._no_keys, self._no_keys
        if self._contexts is not None:
            context, lengths = self._contexts[index], self._positions
            keys, values, pages = context.keys, context.values, context.pages
        block_attention(
            self.qkv, layer.q_norm, layer.k_norm, self.eps, weights.cos, weights.sin, lengths, keys, values, self.attended,
            self._partial, self._stats, block=self.block, causal=True, window=layer.window, splits=self._splits, pages=pages,
        )  # fmt: skip

    def _plan_attention(self, longest: int) -> None:
        config = self.config
        target = TARGET_PROGRAMS if self.batch > 1 or longest > LONG_CONTEXT else TARGET_PROGRAMS // 4
        self._splits = max(1, min(target // (self.batch * config.num_kv_heads), -(-longest // 64)))
        sizes = partial_sizes(
            self.batch, config.num_kv_heads, config.num_heads, config.head_dim, self.block, self._splits
        )
        wanted = sizes if self._splits > 1 else (1, 1)
        self._partial, self._stats = (torch.empty(size, device=self.x.device) for size in wanted)
