"""TensorRT-LLM's context caches in the drafter's layout.

Its worker owns the cache and appends what ``precompute_context_kv`` returns. Dense (``attention_backend: VANILLA``): keys and values
[S, L, C, Hkv, D] by slot. Paged (``TRTLLM``): per layer [P, 2, Hkv, page, D] with a table of page numbers per row. Symbols: S slots,
G sequences of the batch, L layers, C columns, D head size. All sizes are fixed, so the reads can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspine_export.errors import UsageError


def to_worker_rows(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """[1, L, Hkv, T, D] of T tokens to the rows the worker scatters, contiguous [T, L, Hkv, D]: it masks them in place."""
    return keys[0].permute(2, 0, 1, 3).contiguous(), values[0].permute(2, 0, 1, 3).contiguous()


def read_dense(k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [G, L, Hkv, C, D] of the slots int64 [G] of a dense cache [S, L, C, Hkv, D]."""
    return k_cache.index_select(0, slots).transpose(2, 3), v_cache.index_select(0, slots).transpose(2, 3)


def read_paged(kv_cache: Tensor | Sequence[Tensor], page_table: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [G, L, Hkv, C, D] through rows int64 [G] of a page table int32 [R, pages]; C = pages times page size."""
    pages = page_table.index_select(0, rows).long()  # [G, pages]
    layers = [layer[pages] for layer in kv_cache]  # each [G, pages, 2, Hkv, page, D]
    stacked = torch.stack(layers, dim=1).permute(0, 1, 3, 4, 2, 5, 6).flatten(4, 5)  # [G, L, 2, Hkv, C, D]
    return stacked[:, :, 0], stacked[:, :, 1]


def read_context(
    ctx_k_cache: Tensor | None,
    ctx_v_cache: Tensor | None,
    rows: Tensor,
    ctx_kv_cache: Tensor | Sequence[Tensor] | None,
    ctx_page_table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Keys and values [G, L, Hkv, C, D] from whichever cache the worker passed.

    Raises:
        UsageError: neither a dense cache nor a paged one with its table.
    """
    rows = rows.long()
    if ctx_kv_cache is not None and ctx_page_table is not None:
        return read_paged(ctx_kv_cache, ctx_page_table, rows)
    if ctx_k_cache is None or ctx_v_cache is None:
        raise UsageError(
            "TensorRT-LLM passed no context cache to the drafter",
            where="dflash_forward",
            expected="ctx_k_cache and ctx_v_cache, or ctx_kv_cache and ctx_page_table",
            fix="set attention_backend: VANILLA in config.yaml",
        )
    return read_dense(ctx_k_cache, ctx_v_cache, rows)
