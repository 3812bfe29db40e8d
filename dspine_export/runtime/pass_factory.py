"""The passes of one drafter: its packed weights, and draft and append passes over any cache and batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

import torch

from dspine_export.model.drafter import Drafter
from dspine_export.runtime.injection_form import packing
from dspine_export.runtime.kernel_pass import CacheView, ContextPass, DraftPass
from dspine_export.runtime.packed_weights import pack, with_positions

if TYPE_CHECKING:
    from dspine_export.runtime.fp8_weights import RoundedDrafter

WeightFormat = Literal["full", "fp8"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)


class PassFactory:
    """Makes passes. The drafter's own module is not kept: merged matrices are copies, and its originals may be freed.

    Args:
        positions: longest context plus one block that the rotation tables must reach.
        weights: ``full`` reads the drafter as it is, ``fp8`` a rounded copy (`fp8_weights`).
    """

    def __init__(self, drafter: Drafter, positions: int, weights: WeightFormat = "full") -> None:
        self.config = drafter.config
        packed = pack(drafter, positions, **packing(drafter.embed_tokens.element_size()))
        self._drafting = self._appending = packed
        self._rounded: RoundedDrafter | None = None
        if weights == "fp8":
            from dspine_export.runtime.fp8_weights import context_weights, quantise_drafter

            self._rounded, self._appending = quantise_drafter(packed), context_weights(packed)
            self._drafting = self._rounded.few

    @property
    def device(self) -> torch.device:
        return self._appending.fc.device

    def draft(self, cache: CacheView, batch: int) -> DraftPass:
        """A draft pass for `batch` sequences of `cache`."""
        if self._rounded is None:
            return DraftPass(self.config, self._drafting, cache, batch)
        from dspine_export.runtime.fp8_weights import fp8_pass

        return fp8_pass(self.config, self._rounded, cache, batch)

    def append(self, cache: CacheView, tokens: int, batch: int) -> ContextPass:
        """An append of up to `tokens` rows to each of `batch` sequences of `cache`."""
        return ContextPass(self.config, self._appending, cache, tokens, batch)

    def reach(self, positions: int) -> None:
        """Longer rotation tables, for passes made from now on."""
        if self._appending.cos.shape[0] >= positions:
            return
        self._appending = longer = with_positions(self._appending, self.config, positions)
        self._drafting = replace(self._drafting, cos=longer.cos, sin=longer.sin)
        if self._rounded is not None:
            self._rounded = self._rounded.with_rotations(longer.cos, longer.sin)
