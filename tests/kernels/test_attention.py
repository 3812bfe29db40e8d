"""Attention over cached context and own block, dense and paged, and what fills the cache: against the naive references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_kernels.attention import (
    append_context,
    append_context_reference,
    block_attention,
    block_attention_reference,
    store_context,
)
from dspine_kernels.attention.block import partial_sizes

from tests.kernels.comparison import close, poisoned, randn


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


CASES = [(4, 2, 16, 8, True, None), (3, 3, 16, 4, False, None), (8, 2, 32, 16, True, 9)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block", "causal", "window"), CASES)
def test_block_attention(
    heads: int, kv_heads: int, dim: int, block: int, causal: bool, window: int | None,
    device: torch.device, dtypes: tuple[torch.dtype, ...],
) -> None:  # fmt: skip
    for dtype in dtypes:
        lengths = torch.tensor([40, 0, 17], device=device)
        cache = [randn(3, kv_heads, 48, dim, device=device, dtype=dtype) for _ in range(2)]
        for tensor in cache:  # rows past the length must not matter
            tensor[0, :, 40:], tensor[1], tensor[2, :, 17:] = float("nan"), float("nan"), float("nan")
        qkv = randn(3 * block, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
        norms = [randn(dim, device=device, dtype=dtype) for _ in range(2)]
        angles = torch.outer(torch.arange(80.0), 100.0 ** -(torch.arange(0, dim, 2) / dim)).to(device)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        out = poisoned(3 * block, heads * dim, device=device, dtype=dtype)
        splits = 3
        scratch = [poisoned(n, device=device) for n in partial_sizes(3, kv_heads, heads, dim, block, splits)]
        block_attention(
            qkv, *norms, 1e-6, cos, sin, lengths, *cache, out, *scratch,
            block=block, causal=causal, window=window, splits=splits,
        )  # fmt: skip
        want = block_attention_reference(qkv, *norms, 1e-6, cos, sin, lengths, *cache, heads, block, causal, window)
        close(out, want, dtype)
        subset = torch.tensor([2, 0], device=device)  # sequences that own other rows of the cache than their own index
        out = poisoned(2 * block, heads * dim, device=device, dtype=dtype)
        block_attention(
            torch.cat((qkv[2 * block :], qkv[:block])), *norms, 1e-6, cos, sin, lengths, *cache, out, *scratch,
            block=block, causal=causal, window=window, splits=splits, slots=subset,
        )  # fmt: skip
        close(out, torch.cat((want[2 * block :], want[:block])), dtype)


@pytest.mark.parametrize("page", [4, 16])
def test_block_attention_over_pages(page: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """The same from scattered pages, keys beside values, lengths among other numbers; positions past the tables rotate as the last."""
    heads, kv_heads, dim, block, splits = 4, 2, 16, 8, 3
    for dtype in dtypes:
        positions = torch.zeros(3, block, dtype=torch.int64, device=device)
        positions[:, 0] = lengths = torch.tensor([40, 0, 17], device=device)
        dense = [randn(3, kv_heads, 48, dim, device=device, dtype=dtype) for _ in range(2)]
        per = 48 // page
        table = torch.randperm(3 * per, device=device).view(3, per).int()
        pool = poisoned(3 * per, page, kv_heads, 2 * dim, device=device, dtype=dtype).transpose(1, 2)
        for part, tensor in zip(pool.split(dim, dim=-1), dense, strict=True):
            part[table.flatten().long()] = tensor.unflatten(2, (per, page)).transpose(1, 2).flatten(0, 1)
        table[1], table[2, -(-17 // page) :] = 1 << 20, 1 << 20  # never looked at
        qkv = randn(3 * block, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
        norms = [randn(dim, device=device, dtype=dtype) for _ in range(2)]
        angles = torch.outer(torch.arange(48.0), 100.0 ** -(torch.arange(0, dim, 2) / dim)).to(device)
        both = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)[:44]
        out = poisoned(3 * block, heads * dim, device=device, dtype=dtype)
        scratch = [poisoned(n, device=device) for n in partial_sizes(3, kv_heads, heads, dim, block, splits)]
        block_attention(
            qkv, *norms, 1e-6, *both.chunk(2, dim=1), positions[:, 0], *pool.split(dim, dim=-1), out, *scratch,
            block=block, causal=True, window=None, splits=splits, pages=table,
        )  # fmt: skip
        cos, sin = (torch.cat((x, x[-1:].expand(8, -1))) for x in both.chunk(2, dim=1))
        want = block_attention_reference(qkv, *norms, 1e-6, cos, sin, lengths, *dense, heads, block, True, None)
        close(out, want, dtype)


def test_store_context(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Rows of two layers into scattered slots, against an append; padding rows and the pages of others stay as they are."""
    layers, heads, dim, page, count = 2, 3, 16, 4, 7
    for dtype in dtypes:
        rows = randn(count + 1, layers * 2 * heads * dim, device=device, dtype=dtype)
        norms = randn(layers, dim, device=device, dtype=dtype)
        angles = torch.outer(torch.arange(40.0), 100.0 ** -(torch.arange(0, dim, 2) / dim)).to(device)
        both = torch.cat((angles.cos(), angles.sin()), dim=1).to(dtype)
        cos, sin = both.chunk(2, dim=1)
        positions = torch.arange(5, 5 + count + 1, device=device)
        slots = torch.tensor([9, 3, 22, 0, 15, 30, 14, -1], device=device)
        pool = poisoned(layers, 8, page, heads, 2 * dim, device=device, dtype=dtype).transpose(2, 3)
        offsets = torch.tensor([0, pool.stride(0)], device=device)
        store_context(rows, norms, 1e-6, cos, sin, positions, slots, *pool[0].split(dim, dim=-1), offsets)
        start, added = torch.tensor([5], device=device), torch.tensor([count], device=device)
        for layer in range(layers):
            want = [torch.zeros(1, heads, 16, dim, device=device, dtype=dtype) for _ in range(2)]
            own = rows[None, :count].unflatten(-1, (layers, -1))[:, :, layer]
            append_context_reference(
                own, norms[layer], 1e-6, *(x.contiguous() for x in (cos, sin)), start, added, *want
            )
            columns = pool[layer].transpose(1, 2).flatten(0, 1)
            got = columns[slots[:count]].transpose(0, 1)
            for part, expected in zip(got.split(dim, dim=-1), want, strict=True):
                close(part, expected[0, :, 5 : 5 + count], dtype)
            assert int(columns.isnan().flatten(1).all(1).sum()) == 8 * page - count


def test_append_context(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        heads, dim = 2, 16
        rows = randn(3, 5, 2 * heads * dim, device=device, dtype=dtype)
        angles = torch.outer(torch.arange(40.0), 100.0 ** -(torch.arange(0, dim, 2) / dim)).to(device)
        cos, sin, norm = angles.cos().to(dtype), angles.sin().to(dtype), randn(dim, device=device, dtype=dtype)
        lengths, counts = torch.tensor([4, 0, 9], device=device), torch.tensor([5, 0, 3], device=device)
        got = [torch.zeros(3, 2, heads, 16, dim, device=device, dtype=dtype) for _ in range(2)]
        want = [torch.zeros(3, heads, 16, dim, device=device, dtype=dtype) for _ in range(2)]
        append_context(rows, norm, 1e-6, cos, sin, lengths, counts, got[0][:, 1], got[1][:, 1])
        append_context_reference(rows, norm, 1e-6, cos, sin, lengths, counts, *want)
        for g, w in zip(got, want, strict=True):
            close(g[:, 1], w, dtype)
            assert not bool(g[:, 0].any())
        slots = torch.tensor([2, 0], device=device)
        moved = [torch.zeros(3, heads, 16, dim, device=device, dtype=dtype) for _ in range(2)]
        append_context(rows[[2, 0]], norm, 1e-6, cos, sin, lengths, counts[[2, 0]], *moved, slots)
        for m, w in zip(moved, want, strict=True):
            close(m, w, dtype)  # sequence 1 appends nothing
