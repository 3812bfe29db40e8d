"""Float8 weights: the rounding, and a pass over them against the eager model with the same rounded weights."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is imported
pytest.importorskip("triton", reason="Triton is not installed")

from dspine_export.errors import UsageError
from dspine_export.runtime.bench.subjects import random_drafter
from dspine_export.runtime.fp8_weights import quantise
from dspine_export.runtime.kernel_pass import CacheView, DraftPass
from dspine_export.runtime.open_executor import open_executor
from dspine_export.runtime.packed_weights import pack
from dspine_export.runtime.pass_factory import PassFactory
from tests.bench.test_bench import TINY
from tests.runtime.conftest import Opened
from tests.runtime.pairs import Pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_rounding() -> None:
    weight = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 3, 300)[:, None]
    weight[7] = 0
    values, scales = quantise(weight)
    assert values.dtype == torch.float8_e4m3fn and values.shape == weight.shape and scales.shape == (300,)
    back = values.float() * scales[:, None]
    assert torch.equal(back[7], weight[7]) and bool(back.isfinite().all())
    error = (back - weight).norm(dim=1)[weight.norm(dim=1) > 0] / weight.norm(dim=1)[weight.norm(dim=1) > 0]
    assert float(error.max()) < 0.04, "3 bits of mantissa"


def test_a_pass_reads_the_rounded_weights() -> None:
    """Against the unrounded pass over the rounded numbers; the scores, which read the unrounded head, need no second comparison."""
    drafter = random_drafter(replace(TINY, vocab_size=48, mask_token_id=47), torch.float32, DEVICE)
    state = drafter.new_state(2, 16)
    state.keys.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    state.values.normal_(generator=torch.Generator(DEVICE).manual_seed(2))
    state.lengths.copy_(torch.tensor([16, 5]))
    cache = CacheView(state.keys, state.values, state.lengths)
    rounded = PassFactory(drafter, 32, "fp8").draft(cache, 2)
    packed = pack(drafter, 32)

    def back(weight: torch.Tensor) -> torch.Tensor:
        values, scales = quantise(weight)
        return values.float() * scales[:, None]

    layers = tuple(
        replace(
            layer, qkv=back(layer.qkv), o=back(layer.o), gate_up=back(layer.gate_up), down=back(layer.down),
            readout=None if layer.readout is None else back(layer.readout), write=None if layer.write is None else back(layer.write),
        )
        for layer in packed.layers
    )  # fmt: skip
    plain = DraftPass(drafter.config, replace(packed, layers=layers, lm_head=back(packed.lm_head)), cache, fused=True)
    for draft in (rounded, plain):
        draft.anchor_ids.copy_(torch.tensor([3, 11]))
        draft.launch()
    torch.testing.assert_close(rounded.logits, plain.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(rounded.candidate_ids, plain.candidate_ids)
    torch.testing.assert_close(rounded.x, plain.x, atol=1e-4, rtol=1e-4)


def test_where_it_cannot_be_had(tiny_pair: Pair, tiny: Opened) -> None:
    tables = tiny[0].embed_tokens, tiny[0].lm_head
    for name in ("eager", "torch", "onnxruntime"):
        with pytest.raises(UsageError, match="on a GPU drafts with float8"):
            open_executor(name, tiny_pair.drafter, *tables, weights="fp8")
    with pytest.raises(UsageError, match="Unknown weight format"):
        open_executor("torch", tiny_pair.drafter, *tables, weights="int4")
