"""TensorRT-LLM's context caches as pages, and their committed rows in the drafter's layout.

Its worker owns the cache and appends what ``precompute_context_kv`` returns. Dense (``attention_backend: VANILLA``): keys and values
[S, L, C, Hkv, D] by slot. Paged (``TRTLLM``): per layer [P, 2, Hkv, page, D] with a table of page numbers per row. A slot is one large
page, so both become the same thing here. Symbols: S slots, G sequences of the batch, L layers, C columns, D head size. All sizes are
fixed and lengths stay on the device, so the reads can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspine_export.errors import UsageError


def to_worker_rows(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """[1, L, Hkv, T, D] of T tokens to the rows the worker scatters, contiguous [T, L, Hkv, D]: it masks them in place."""
    return keys[0].permute(2, 0, 1, 3).contiguous(), values[0].permute(2, 0, 1, 3).contiguous()


@dataclass(frozen=True)
class WorkerContext:
    """The cache of one step; nothing is copied before `read` or `copy`.

    Attributes:
        keys, values: per layer a view [P, Hkv, page, D].
        pages: int64 [G, n], column c of sequence g lies in page pages[g, c // page].
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    pages: Tensor

    @property
    def columns(self) -> int:
        """C, the most committed tokens a sequence can have."""
        return self.pages.shape[1] * self.keys[0].shape[2]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """G, Hkv, C, D: one layer of the cache for the sequences of the batch."""
        return self.pages.shape[0], self.keys[0].shape[1], self.columns, self.keys[0].shape[3]

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values [G, L, Hkv, C, D], all columns."""
        return self._gather(self.keys), self._gather(self.values)

    def _gather(self, layers: tuple[Tensor, ...]) -> Tensor:
        rows = [layer[self.pages] for layer in layers]  # each [G, n, Hkv, page, D]
        return torch.stack([layer.transpose(1, 2).flatten(2, 3) for layer in rows], dim=1)

    def copy(self, layer: int, lengths: Tensor, keys_out: Tensor, values_out: Tensor) -> None:
        """The committed columns of one layer to keys_out, values_out [G, Hkv, C' <= C, D] by one launch; other columns stay."""
        from dspine_kernels.paged import copy_committed

        copy_committed(self.keys[layer], self.values[layer], self.pages, lengths, keys_out, values_out)


def open_context(
    ctx_k_cache: Tensor | None,
    ctx_v_cache: Tensor | None,
    rows: Tensor,
    ctx_kv_cache: Tensor | Sequence[Tensor] | None,
    ctx_page_table: Tensor | None,
) -> WorkerContext:
    """Whichever cache the worker passed. rows: int [G], slots of a dense cache, rows of a page table.

    Raises:
        UsageError: neither a dense cache nor a paged one with its table.
    """
    rows = rows.long()
    if ctx_kv_cache is not None and ctx_page_table is not None:
        pages = ctx_page_table.index_select(0, rows).long()
        layers = list(ctx_kv_cache)
        return WorkerContext(tuple(layer[:, 0] for layer in layers), tuple(layer[:, 1] for layer in layers), pages)
    if ctx_k_cache is None or ctx_v_cache is None:
        raise UsageError(
            "TensorRT-LLM passed no context cache to the drafter",
            where="dflash_forward",
            expected="ctx_k_cache and ctx_v_cache, or ctx_kv_cache and ctx_page_table",
            fix="set attention_backend: VANILLA in config.yaml",
        )
    keys, values = (
        tuple(cache[:, layer].transpose(1, 2) for layer in range(cache.shape[1]))
        for cache in (ctx_k_cache, ctx_v_cache)
    )
    return WorkerContext(keys, values, rows[:, None])
