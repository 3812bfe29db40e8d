"""The drafter's layers and its context on this package's kernels, with vLLM's weights, rotation tables, cache and block tables as they are.

Passes are made in eager calls, which precede every capture, and kept: a graph records the addresses of their buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from dspine_kernels.attention import store_context
from dspine_kernels.linear import FEW_NARROW_ROWS, FEW_ROWS
from torch import Tensor

from dspine_export.runtime.packed_weights import PackedDrafter, PackedLayer
from dspine_export.vllm.backbone_pass import MOST_STATIC_ROWS, BackbonePass, Buffers, Geometry, LayerContext
from dspine_export.vllm.context_projection import ContextProjection, TapProjection
from dspine_export.vllm.fused_support import products
from dspine_export.vllm.product_weights import is_rounded, matrix, row_scales


def packed_views(backbone: Any) -> PackedDrafter:
    """vLLM's parameters by the names of our layers; copied are only the readouts, behind the gates folded into them."""
    injection, rotations = backbone.injection, backbone.layers[0].self_attn.rotary_emb.cos_sin_cache
    cos, sin = rotations.chunk(2, dim=-1)
    end = len(backbone.layers) - 1
    layers = tuple(_layer(layer, injection, index, last=index == end) for index, layer in enumerate(backbone.layers))
    embedding = backbone.embed_tokens.weight
    return PackedDrafter(
        layers, backbone.fc.weight, backbone.hidden_norm.weight, backbone.norm.weight, injection.gates, injection.bias,
        injection.token_table, None, None, embedding, embedding, cos, sin,
    )  # fmt: skip


def _layer(layer: Any, injection: Any, index: int, *, last: bool) -> PackedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    folded = None if last else _folded(injection, index)
    return PackedLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=matrix(attention.qkv_proj),
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
        o=matrix(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=matrix(mlp.gate_up_proj),
        down=matrix(mlp.down_proj),
        readout=injection.readout_weight(index) if folded is None else folded[len(injection.gates) :],
        write=injection.write_weight(index),
        window=None,
        folded=folded,
    )


def scales_of(backbone: Any) -> dict[int, Tensor]:
    """float32 [N] of every matrix [N, K] of the layers by its address; empty where they are not float8."""
    modules = [module for layer in backbone.layers for module in products(layer) if is_rounded(module)]
    return {matrix(module).data_ptr(): row_scales(module) for module in modules}


def _folded(injection: Any, index: int) -> Tensor:
    """Gates times readout above the readout, [3m + r, d]: one product instead of two in a row."""
    readout, gates = injection.readout_weight(index), injection.gates
    return torch.cat(((gates.float() @ readout.float()).to(readout.dtype), readout))


class FusedBackbone:
    """Draft passes by number of requests, and the store of context rows.

    Args:
        backbone: vLLM's module; `fused_support.obstacle` found nothing against it.
        requests: most requests of a pass. longest: positions that a request can reach.
        few: most rows of our own products; None: as measured.
    """

    def __init__(self, backbone: Any, requests: int, longest: int, few: int | None = None) -> None:
        self._backbone, self._requests = backbone, requests
        scales = scales_of(backbone)
        if few is None:
            few = FEW_NARROW_ROWS if scales else FEW_ROWS
        self.geometry = Geometry(backbone.drafter, packed_views(backbone), backbone.block, longest, few, scales)
        self._taps, self._context = TapProjection.of(backbone), ContextProjection.of(backbone, self.geometry)
        static = min(max(requests * backbone.block, few), max(MOST_STATIC_ROWS, few))
        self._buffers = Buffers(self.geometry, static)
        self._passes: dict[int, BackbonePass] = {}
        self._offsets: tuple[list[Any], Tensor] | None = None
        self.last: BackbonePass | None = None

    def run(self, input_ids: Tensor, positions: Tensor, metadata: Any) -> Tensor | None:
        """States before the last injection, [N*B, d], in a buffer of this object; None: not a batch of whole blocks over a known cache.

        Args:
            metadata: vLLM's attention metadata by layer name; None while memory is measured.
        """
        self.last = None
        rows, block = input_ids.shape[0], self.geometry.block
        if rows == 0 or rows % block or not (metadata is None or isinstance(metadata, dict)):
            return None
        contexts = None if metadata is None else self._contexts(metadata, rows // block)
        if metadata is not None and contexts is None:
            return None
        self.last = self._pass(rows // block)
        return self.last.launch(input_ids, positions, contexts)

    def combine(self, taps: Tensor) -> Tensor | None:
        """Context states [R, d] of tapped ones [R, A*d] where their projection is in float8; None: vLLM's own layer does it."""
        return None if self._taps is None or len(taps) == 0 else self._taps.project(taps)

    def store(self, states: Tensor, positions: Tensor, slots: Tensor | list[Tensor | None]) -> bool:
        """Projects context states [R, d] and stores the rows of all layers; False: not done, the cache is not as the kernel needs it."""
        backbone, slots_of_all = self._backbone, _the_same(slots)
        caches = [layer.self_attn.attn.kv_cache for layer in backbone.layers]
        offsets = None if slots_of_all is None else self._cache_offsets(caches)
        if slots_of_all is None or offsets is None or states.shape[0] == 0:
            return False
        weights, eps = self.geometry.weights, self.geometry.config.rms_norm_eps
        rows = self._context.project(states, weights.hidden_norm, eps)
        keys, values = caches[0].chunk(2, dim=-1)
        store_context(
            rows, backbone._k_norm_weights, eps, weights.cos, weights.sin, positions, slots_of_all, keys, values, offsets
        )  # fmt: skip
        return True

    def refresh(self) -> None:
        """Copies and folds anew, after weights were overwritten in place."""
        for index, layer in enumerate(self.geometry.weights.layers):
            if layer.folded is not None:
                layer.folded.copy_(_folded(self._backbone.injection, index))
        for address, scales in scales_of(self._backbone).items():
            self.geometry.scales[address].copy_(scales)
        self._context.refresh(ContextProjection.of(self._backbone, self.geometry))
        if self._taps is not None:
            self._taps.refresh(self._backbone)

    def _pass(self, batch: int) -> BackbonePass:
        found = self._passes.get(batch)
        if found is not None:
            return found
        rows = batch * self.geometry.block
        if rows > self._buffers.rows:
            return BackbonePass(self.geometry, Buffers(self.geometry, rows), batch)
        made = BackbonePass(self.geometry, self._buffers, batch)
        if not _recording(made.x):
            self._passes[batch] = made
        return made

    def _contexts(self, metadata: dict[str, Any], batch: int) -> list[LayerContext] | None:
        found = []
        for layer in self._backbone.layers:
            attention = layer.self_attn.attn
            cache, pages = attention.kv_cache, getattr(metadata[attention.layer_name], "block_table", None)
            if not self._known(cache) or pages is None or pages.shape[0] < batch or pages.stride(1) != 1:
                return None
            keys, values = cache.chunk(2, dim=-1)
            found.append(LayerContext(keys, values, pages))
        return found

    def _known(self, cache: Tensor) -> bool:
        """Whether a layer's cache is [P, Hkv, page, 2 D], keys before values."""
        config = self.geometry.config
        return (
            cache.ndim == 4
            and cache.shape[1] == config.num_kv_heads
            and cache.shape[3] == 2 * config.head_dim
            and cache.stride(3) == 1
            and cache.dtype == self.geometry.weights.embed_tokens.dtype
        )

    def _cache_offsets(self, caches: list[Tensor]) -> Tensor | None:
        """Elements between the first layer's cache and each layer's, int64 [L] on the device."""
        seen = [(cache.data_ptr(), cache.shape, cache.stride()) for cache in caches]
        if self._offsets is not None and self._offsets[0] == seen:
            return self._offsets[1]
        first, alike = caches[0], {layout[1:] for layout in seen}
        if len(alike) > 1 or not self._known(first) or _recording(first):
            return None
        size = first.element_size()
        offsets = torch.tensor([(layout[0] - seen[0][0]) // size for layout in seen], device=first.device)
        self._offsets = (seen, offsets)
        return offsets


def _the_same(slots: Tensor | list[Tensor | None]) -> Tensor | None:
    """The slots of every layer, where all layers share them."""
    if isinstance(slots, Tensor):
        return slots
    first = slots[0]
    if first is None or any(one is None or one.data_ptr() != first.data_ptr() for one in slots):
        return None
    return first


def _recording(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
