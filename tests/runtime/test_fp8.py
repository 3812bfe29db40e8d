"""Float8: the rounding, the product, and a pass of it against the unrounded one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is imported
pytest.importorskip("triton", reason="Triton is not installed")

from pathlib import Path

from dspine_kernels.linear import Plan

from dspine_export.errors import UsageError
from dspine_export.pipeline.progress import Silent
from dspine_export.pipeline.run import RunRequest, open_session
from dspine_export.runtime.bench.subjects import kinds, random_drafter
from dspine_export.runtime.float8 import Scratch, own_plan, quantise, scaled_product
from dspine_export.runtime.fp8_weights import FewFp8Pass, Fp8Layers, ManyFp8Pass, quantise_drafter
from dspine_export.runtime.injection_form import Form
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


@pytest.mark.parametrize("exact", [True, False], ids=["not_rounded", "rounded"])
@pytest.mark.parametrize(("kind", "batch", "form"), [
    ("DSpine", 3, None), ("DFlash", 1, None), ("DSpine", 3, "merged"), ("DSpine", 2, "folded"),
    ("DFlash", 3, "plain"),
])  # fmt: skip
def test_a_pass_multiplies_rounded_numbers(
    kind: str, batch: int, form: Form | None, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the unrounded pass: equal where rounding is to float32, else as close as four bits of every factor allow.

    form: of our own products; None: the vendor's.
    """
    if exact:
        monkeypatch.setattr("dspine_export.runtime.float8.NARROW", torch.float32)
    shapes = kinds(replace(TINY, vocab_size=48, mask_token_id=47))[kind]
    drafter = random_drafter(shapes, torch.float32, DEVICE)
    state = drafter.new_state(3, 16)
    state.keys.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    state.values.normal_(generator=torch.Generator(DEVICE).manual_seed(2))
    state.lengths.copy_(torch.tensor([16, 5, 1]))
    cache = CacheView(state.keys, state.values, state.lengths)
    rounded: DraftPass
    if form is None:
        rounded = PassFactory(drafter, 32, "fp8").draft(cache, batch)
    else:
        weights = quantise_drafter(pack(drafter, 32, folded=kind == "DSpine", merged=form == "merged"))
        rounded = FewFp8Pass(drafter.config, weights, cache, batch, form=form)
    plain = DraftPass(drafter.config, pack(drafter, 32), cache, batch, fused=False)
    for draft in (rounded, plain):
        draft.anchor_ids.copy_(torch.tensor([3, 11, 7])[:batch])
        draft.launch()
    # What a pass leaves behind in `normed` is a factor by row, which orders nothing, and in our own products not even that.
    for name in ("x", "normed", "logits") if form is None else ("x", "logits"):
        got, want = getattr(rounded, name), getattr(plain, name)
        if name != "x":
            got, want = (rows / rows.norm(dim=1, keepdim=True) for rows in (got, want))
        if exact:
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        else:
            assert 1e-3 < float((got - want).norm() / want.norm()) < 0.25, name
    if exact:
        assert torch.equal(rounded.tokens, plain.tokens)


@pytest.mark.parametrize(("kind", "intermediate"), [("DSpine", 48), ("DFlash", 544), ("DSpine", 40)])
def test_own_products_add_to_the_state_where_all_can(kind: str, intermediate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU as a GPU would choose, rounding to float32. An intermediate size of 40 is none for own products: then nothing is added."""
    monkeypatch.setattr("dspine_export.runtime.float8.NARROW", torch.float32)
    monkeypatch.setattr("dspine_export.runtime.float8._multiplies", lambda weight, _: not any(n % 16 for n in weight.shape))
    shapes = replace(kinds(TINY)[kind], vocab_size=48, mask_token_id=47, intermediate_size=intermediate)
    drafter = random_drafter(shapes, torch.float32, DEVICE)
    state = drafter.new_state(2, 16)
    state.keys.normal_(generator=torch.Generator(DEVICE).manual_seed(1))
    state.values.normal_(generator=torch.Generator(DEVICE).manual_seed(2))
    state.lengths.copy_(torch.tensor([16, 3]))
    cache = CacheView(state.keys, state.values, state.lengths)
    rounded = ManyFp8Pass(shapes, quantise_drafter(pack(drafter, 32)), cache, 2)
    assert isinstance(rounded.layers, Fp8Layers) and rounded.layers.adds == (intermediate % 16 == 0)
    plain = DraftPass(shapes, pack(drafter, 32), cache, 2, fused=False)
    for draft in (rounded, plain):
        draft.anchor_ids.copy_(torch.tensor([3, 11]))
        for _ in range(2):  # scratch is left as it was found
            draft.launch()
    torch.testing.assert_close(rounded.x, plain.x, atol=1e-4, rtol=1e-4)
    assert torch.equal(rounded.tokens, plain.tokens)


def test_scratch_is_made_once_a_size() -> None:
    """For all rows of a tile; no two owners share any, so that their products may run at the same time."""
    scratch, plan = Scratch(), Plan(64, 16, 256, 2, 4, 4)
    outs = [torch.empty(rows, columns, device=DEVICE) for rows, columns in ((5, 64), (16, 64), (17, 64), (5, 128))]
    made = [scratch.of(plan, out) for out in outs]
    assert made[0] is made[1]
    assert len({id(one) for one in made}) == 3
    assert scratch.of(plan, outs[0]) is made[0] and Scratch().of(plan, outs[0]) is not made[0]
    assert made[2].partial.numel() == 2 * 64 * 32 and not made[2].counters.any()


@pytest.mark.parametrize(("rows", "columns", "depth"), [
    (5, 48, 32), (128, 4096, 1024), (256, 4096, 512), (130, 9216, 512), (7, 64, 528), (100, 512, 2048),
])  # fmt: skip
def test_scaled_product(rows: int, columns: int, depth: int) -> None:
    """By our own product and by the vendor's where there is a GPU, widened where there is none."""
    if DEVICE == "cpu" and rows > 5:
        pytest.skip("the same computation as the smallest without a GPU")
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, depth, generator=generator).to(DEVICE, torch.bfloat16) for n in (rows, columns))
    (x8, x_scales), (w8, scales) = quantise(x), quantise(weight)
    out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    scaled_product(x8, x_scales, w8, scales, out)
    want = (x8.float() * x_scales[:, None]) @ (w8.float() * scales[:, None]).T
    error = (out.float() - want).norm() / want.norm()
    assert float(error) < 0.01
    if own_plan(w8, out) is not None:
        residual = torch.randn(rows, columns, generator=generator).to(DEVICE, torch.bfloat16)
        added = residual.clone()
        scaled_product(x8, x_scales, w8, scales, added, residual=added)
        torch.testing.assert_close(added.float(), want + residual.float(), rtol=0.02, atol=0.02 * float(want.std()))


def test_a_run_refuses_before_the_target_is_read(tmp_path: Path) -> None:
    """The sources do not exist, which would be said next."""
    for executor, weights, words in (
        ("torch", "fp8", "executor torch on cpu"),
        (None, "fp9", "full or fp8"),
        ("fast", "full", "onnxruntime"),
    ):
        with pytest.raises(UsageError, match=words):
            open_session(RunRequest(tmp_path / "drafter", tmp_path / "target", executor, None, "cpu", weights), Silent())


def test_where_it_cannot_be_had(tiny_pair: Pair, tiny: Opened) -> None:
    tables = tiny[0].embed_tokens, tiny[0].lm_head
    for name in ("eager", "torch", "onnxruntime"):
        with pytest.raises(UsageError, match="on a GPU drafts with float8"):
            open_executor(name, tiny_pair.drafter, *tables, weights="fp8")
    with pytest.raises(UsageError, match="Unknown weight format"):
        open_executor("torch", tiny_pair.drafter, *tables, weights="int4")
