"""What context rows are projected by: the tapped states to the drafter's, and those to keys and values of all layers in one product."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from dspine_kernels.rows import rms_norm
from torch import Tensor

from dspine_export.runtime.float8 import RoundedRows, Scratch
from dspine_export.vllm.backbone_pass import Geometry
from dspine_export.vllm.product_weights import is_rounded, matrix, obstacle, row_scales


@dataclass(frozen=True)
class TapProjection:
    """weight: e4m3 [d, A*d] with float32 scales [d]: vLLM's own layer rounds the tapped states in a launch two to three times as long."""

    weight: Tensor
    scales: Tensor
    _scratch: Scratch = field(default_factory=Scratch)

    @classmethod
    def of(cls, backbone: Any) -> TapProjection | None:
        """None: not in float8, or held otherwise than the product expects."""
        fc = backbone.fc
        if not is_rounded(fc) or obstacle(fc, matrix(fc).shape[1]) is not None:
            return None
        return cls(matrix(fc), row_scales(fc))

    def project(self, taps: Tensor) -> Tensor:
        """[R, A*d] -> [R, d]"""
        rows, columns = taps.shape
        rounded = RoundedRows.empty(rows, columns, taps.device)
        rounded.round(taps)
        states = taps.new_empty(rows, len(self.weight))
        rounded.times(self.weight, self.scales, states, scratch=self._scratch)
        return states

    def refresh(self, backbone: Any) -> None:
        """Takes new scales; the weight is vLLM's own."""
        self.scales.copy_(row_scales(backbone.fc))


@dataclass(frozen=True)
class ContextProjection:
    """weight: [L * 2 Hkv D, d], of every layer keys above values. scales: float32 [L * 2 Hkv D], of a weight in float8."""

    weight: Tensor
    scales: Tensor | None
    _scratch: Scratch = field(default_factory=Scratch)

    @classmethod
    def of(cls, backbone: Any, geometry: Geometry) -> ContextProjection:
        """vLLM's own matrix; where the layers are float8 it has none, and their rows are copied (42 MB at Qwen3-8B)."""
        if not geometry.scales:
            return cls(backbone._fused_kv_weight, None)
        layers = geometry.weights.layers
        scales = [geometry.scales[layer.qkv.data_ptr()][layer.o.shape[1] :] for layer in layers]
        return cls(torch.cat([layer.context for layer in layers]), torch.cat(scales))

    def project(self, states: Tensor, gain: Tensor, eps: float) -> Tensor:
        """states [R, d] -> norm with `gain`, product, [R, L * 2 Hkv D]. In float8 the normed rows are rounded as well."""
        if self.scales is None:
            return torch.mm(rms_norm(states, gain, eps, torch.empty_like(states)), self.weight.T)
        rounded = RoundedRows.empty(len(states), states.shape[1], states.device)
        rounded.round(states, gain=gain, eps=eps)
        rows = states.new_empty(len(states), len(self.weight))
        rounded.times(self.weight, self.scales, rows, scratch=self._scratch)
        return rows

    def refresh(self, other: ContextProjection) -> None:
        """Takes the numbers of `other`; a graph records these addresses."""
        if self.scales is not None and other.scales is not None:
            self.weight.copy_(other.weight)
            self.scales.copy_(other.scales)
