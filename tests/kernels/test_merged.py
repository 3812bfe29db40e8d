"""Injections that share their products with the next layer's projections, against the injection followed by norm and projection."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

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


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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


def _small() -> DrafterConfig:
    return replace(
        QWEN3_8B, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48, vocab_size=64,
        block_size=4, mask_token_id=63, layer_types=("full_attention",) * 3, transfer=TransferConfig(rank=16, message_size=8, top_k=4),
    )  # fmt: skip


def test_forms_by_rows() -> None:
    """What a row count asks for, as far as the weights were packed for it; float32 and weights without gates are plain."""
    narrow = random_drafter(_small(), torch.bfloat16, "cpu")
    assert packing(2) == {"folded": True, "merged": True} and not any(packing(4).values())
    packed = pack(narrow, 8, **packing(2))
    assert [form_for(rows, packed) for rows in (16, 128, 129, 256, 257)] == ["merged"] * 2 + ["folded"] * 2 + ["plain"]
    assert [form_for(rows, pack(narrow, 8, folded=True)) for rows in (64, 65)] == ["folded", "folded"]
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
