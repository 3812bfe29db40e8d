"""Injections that share their products with the next layer's projections, against the injection followed by norm and projection."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_kernels.attention import block_attention, block_attention_reference
from dspine_kernels.attention.block import partial_sizes
from dspine_kernels.injection import gated_messages_reference
from dspine_kernels.injection.gated_write import gated_write, write_parts
from dspine_kernels.rows import rms_norm_reference, write_and_norm_reference, write_and_project
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig, TransferConfig
from dspine_export.runtime.bench.subjects import QWEN3_8B, random_drafter
from dspine_export.runtime.injection_form import form_for, packing
from dspine_export.runtime.packed_weights import pack
from tests.kernels.comparison import close, poisoned, randn

EPS = 1e-6


def _spread(write: Tensor, projection: Tensor) -> Tensor:
    return torch.cat((write, (projection.float() @ write.float()).to(write.dtype)))


def _parts(x: Tensor) -> Tensor:
    return x.float().pow(2).unflatten(-1, (4, -1)).sum(-1).T.contiguous()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("block", "batch"), [(4, 2), (16, 2), (5, 7)])
def test_gated_write(block: int, batch: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Sizes that no tile divides, projections in rows of a wider buffer, more rows than a tile has; with and without projections."""
    rows, rank, m, d, more, vocabulary = batch * block, 24, 40, 72, 56, 30
    for dtype in dtypes:
        readout = randn(rows, rank, device=device, dtype=dtype, scale=3.0)
        gates, bias = randn(3 * m, rank, device=device, dtype=dtype, scale=0.1), randn(m, device=device, dtype=dtype)
        table, anchors = randn(vocabulary, 2 * m, device=device, dtype=dtype), torch.arange(batch, device=device)
        want_z, want_receiver = gated_messages_reference(readout, gates, bias, table[anchors], block)
        hidden, gain = randn(rows, d, device=device, dtype=dtype, scale=2.0), randn(d, device=device, dtype=dtype)
        write = randn(d, m, device=device, dtype=dtype, scale=0.2)
        projection = randn(more, d, device=device, dtype=dtype, scale=0.1)
        wide = poisoned(rows, 3 * m + more, device=device, dtype=dtype)
        wide[:, : 3 * m] = (readout.float() @ gates.float().T).to(dtype)
        wide[:, 3 * m :] = (hidden.float() @ projection.float().T).to(dtype)
        want, _, _ = write_and_norm_reference(hidden, want_z @ write.float().T, gain, EPS, block)
        inputs = (wide[:, : 3 * m], _parts(readout), rank, bias, table, anchors)
        injected, scaled = (poisoned(rows, d, device=device, dtype=dtype) for _ in range(2))
        squares = poisoned(write_parts(d), rows, device=device)
        z, receiver = poisoned(rows, m, device=device, dtype=dtype), poisoned(rows, m, device=device)
        gated_write(
            *inputs, write, hidden, _parts(hidden), injected, squares, block, gain=gain, scaled=scaled, z=z, receiver_gate=receiver
        )  # fmt: skip
        close(z, want_z, dtype)
        close(receiver, want_receiver, dtype)
        close(injected, want, dtype)
        close(scaled, injected.float() * gain.float(), dtype)
        close(squares.sum(0), injected.float().pow(2).sum(-1), torch.float32)
        in_place, after = hidden.clone(), poisoned(rows, more, device=device, dtype=dtype)
        squares = poisoned(write_parts(d, more), rows, device=device)
        gated_write(
            *inputs, _spread(write, projection), in_place, _parts(hidden), in_place, squares, block,
            before=wide[:, 3 * m :], after=after,
        )  # fmt: skip
        close(in_place, want, dtype)
        close(squares.sum(0), in_place.float().pow(2).sum(-1), torch.float32)
        close(after, want @ projection.float().T, dtype)


def test_write_and_project(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Slot 0 keeps its state, whatever its row of the update holds."""
    rows, d, more, m, block = 15, 72, 104, 24, 5
    for dtype in dtypes:
        hidden, z = (randn(rows, n, device=device, dtype=dtype, scale=2.0) for n in (d, m))
        write, projection = (randn(*s, device=device, dtype=dtype, scale=0.2) for s in ((d, m), (more, d)))
        update = (z.float() @ _spread(write, projection).float().T).to(dtype)
        wide = poisoned(rows, more + 16, device=device, dtype=dtype)
        wide[:, 16:] = (hidden.float() @ projection.float().T).to(dtype)
        want, _, _ = write_and_norm_reference(hidden, update[:, :d], torch.ones_like(hidden[0]), EPS, block)
        injected, out = hidden.clone(), poisoned(rows, more, device=device, dtype=dtype)
        write_and_project(injected, update, wide[:, 16:], EPS, block, injected, out)
        close(injected, want, dtype)
        assert torch.equal(injected[::block], hidden[::block])
        close(out, rms_norm_reference(injected, torch.ones_like(injected[0]), EPS) @ projection.float().T, dtype)


@pytest.mark.parametrize("block", [5, 16])
def test_attention_takes_the_rows_norm(block: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    """Rows of q, k and v that still lack their 1 / rms, of very different sizes."""
    heads, kv_heads, dim, splits, width = 4, 2, 16, 2, 24
    for dtype in dtypes:
        lengths = torch.tensor([20, 0], device=device)
        cache = [randn(2, kv_heads, 32, dim, device=device, dtype=dtype) for _ in range(2)]
        x = (
            randn(2 * block, width, device=device, dtype=dtype)
            * torch.logspace(-2, 2, 2 * block, device=device, dtype=torch.float32).to(dtype)[:, None]
        )
        weight = randn((heads + 2 * kv_heads) * dim, width, device=device, dtype=dtype)
        raw = (x.float() @ weight.float().T).to(dtype)
        norms = [randn(dim, device=device, dtype=dtype) for _ in range(2)]
        angles = torch.outer(torch.arange(80.0), 100.0 ** -(torch.arange(0, dim, 2) / dim)).to(device)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        out = poisoned(2 * block, heads * dim, device=device, dtype=dtype)
        scratch = [poisoned(n, device=device) for n in partial_sizes(2, kv_heads, heads, dim, block, splits)]
        block_attention(
            raw, *norms, EPS, cos, sin, lengths, *cache, out, *scratch, block=block, causal=True, window=None, splits=splits,
            squares=_parts(x), norm_width=width,
        )  # fmt: skip
        normed = raw.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
        want = block_attention_reference(normed, *norms, EPS, cos, sin, lengths, *cache, heads, block, True, None)
        close(out, want, dtype)


def _small() -> DrafterConfig:
    return replace(
        QWEN3_8B, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48, vocab_size=64,
        block_size=4, mask_token_id=63, layer_types=("full_attention",) * 3, transfer=TransferConfig(rank=16, message_size=8, top_k=4),
    )  # fmt: skip


def test_forms_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row count asks for, as far as the weights were packed for it; float32 and weights without gates are plain."""
    monkeypatch.setattr("dspine_export.runtime.injection_form.FORMS", ((16, "gated"), (256, "merged")))
    narrow = random_drafter(_small(), torch.bfloat16, "cpu")
    assert packing(2) == {"folded": True, "merged": True} and not any(packing(4).values())
    packed = pack(narrow, 8, **packing(2))
    assert [form_for(rows, packed) for rows in (16, 17, 256, 257)] == ["gated", "merged", "merged", "plain"]
    assert [form_for(rows, pack(narrow, 8, folded=True)) for rows in (16, 17)] == ["gated", "folded"]
    assert form_for(16, pack(narrow, 8)) == "plain"


def test_merged_weights_are_views() -> None:
    """Nothing is held twice but the key and value projections that appends read without the gain; every part computes what it did."""
    drafter = random_drafter(_small(), torch.float32, "cpu")
    for layer in drafter.model.layers:
        layer.input_layernorm.weight.uniform_(0.5, 2.0)
    plain, merged = pack(drafter, 8, folded=True), pack(drafter, 8, merged=True)
    assert merged.merged and form_for(16, merged) == "plain"  # float32
    for index, (before, after) in enumerate(zip(plain.layers, merged.layers, strict=True)):
        torch.testing.assert_close(after.qkv * after.input_norm, before.qkv * before.input_norm)
        for name in ("folded", "readout", "write", "context"):
            assert torch.equal(getattr(after, name), getattr(before, name))
        if index < 2:
            following = merged.layers[index + 1]
            assert after.read is not None and after.spread is not None and after.folded is not None
            store = after.read.untyped_storage().data_ptr()
            assert {x.untyped_storage().data_ptr() for x in (after.folded, after.readout, following.qkv)} == {store}
            torch.testing.assert_close(after.spread[32:], following.qkv @ before.write)
        else:
            assert after.read is None and after.spread is None
