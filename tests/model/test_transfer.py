"""Transfer codes: the canonical construction, when it may be used, and what it must reproduce."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspine_export import load_checkpoint
from dspine_export.checkpoint.config import CANONICAL_TRANSFER_BASIS, TransferConfig, TransferProbe
from dspine_export.errors import CheckpointError
from dspine_export.model.transfer import gram_difference, probe_error, recompute_codes, transfer_codes
from tests.golden_cases import CASES, drafter_path, golden_drafter, golden_io


@pytest.fixture
def head() -> torch.Tensor:
    return torch.randn(120, 24, generator=torch.Generator().manual_seed(0))


def declared(codes: torch.Tensor, ids: tuple[int, ...], rank: int) -> TransferConfig:
    components = tuple(tuple(row) for row in codes[list(ids), :8].tolist())
    return TransferConfig(rank, 4, 4, CANONICAL_TRANSFER_BASIS, TransferProbe(ids, components))


def test_definition(head: torch.Tensor) -> None:
    """Written out with an SVD, which shares neither signs nor routine with the eigendecomposition."""
    unit = head.double() / head.double().norm(dim=-1, keepdim=True)
    centred = unit - unit.mean(0)
    _, singular, basis = torch.linalg.svd(centred, full_matrices=False)
    vectors = basis[:10].T
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    want = centred @ (vectors * largest.sign()) / singular[:10]
    want = want / want.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(transfer_codes(head, 10).double(), want, rtol=0, atol=1e-6)


def test_rows_are_unit_length_and_signs_are_fixed(head: torch.Tensor) -> None:
    codes = transfer_codes(head, 12)
    assert codes.dtype == torch.float32
    torch.testing.assert_close(codes.norm(dim=-1), torch.ones(120))
    # Rows are normalised, so the scale of the head is irrelevant, as is everything after a change of precision that keeps its values.
    torch.testing.assert_close(transfer_codes(4 * head, 12), codes, rtol=0, atol=1e-6)
    rounded = head.bfloat16()
    assert torch.equal(transfer_codes(rounded, 12), transfer_codes(rounded.float(), 12))


def test_a_smaller_rank_is_a_prefix(head: torch.Tensor) -> None:
    """Eigenvalues descend, so fewer directions are the first ones, up to the row's length."""
    small, large = transfer_codes(head, 5), transfer_codes(head, 9)[:, :5]
    torch.testing.assert_close(small, large / large.norm(dim=-1, keepdim=True), rtol=0, atol=1e-6)


def test_zero_rows_count_and_stay_finite(head: torch.Tensor) -> None:
    padded = torch.cat((head, torch.zeros(8, 24)))
    codes = transfer_codes(padded, 12)
    assert bool(codes.isfinite().all())
    # All padding rows have one code, that of w = 0; the others move, because padding enters mean and scatter.
    assert torch.equal(codes[120:], codes[120:121].expand(8, -1))
    assert float((codes[:120] - transfer_codes(head, 12)).abs().max()) > 1e-4


@pytest.mark.parametrize("rank", [24, 25, 200])
def test_rank_beyond_the_scatter(head: torch.Tensor, rank: int) -> None:
    flat = head.clone()
    flat[:, -1] = 0  # 23 dimensions
    with pytest.raises(CheckpointError, match="fewer dimensions") as caught:
        transfer_codes(flat, rank)
    assert f"rank {rank}" in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_golden_codes_have_the_same_gram_matrix(case: str) -> None:
    codes = golden_drafter(case).model.transfer_codes
    assert codes is not None
    assert gram_difference(codes, golden_io(case)["lm_head.weight"], sample=codes.shape[0]) < 1e-5


def test_gram_difference_is_basis_free_and_notices_another_head(head: torch.Tensor) -> None:
    codes = transfer_codes(head, 12)
    rotation, _ = torch.linalg.qr(torch.randn(12, 12, generator=torch.Generator().manual_seed(1)))
    assert gram_difference(codes @ rotation, head) < 1e-5
    assert gram_difference(codes, torch.randn(120, 24)) > 0.1
    assert gram_difference(codes, torch.zeros(120, 24)) == float("inf")


@pytest.mark.parametrize("case", CASES)
def test_quick_difference_of_golden_codes(case: str) -> None:
    """Far below half the tolerance, in float32 and bfloat16 heads alike, so that the exact one is needed for foreign heads only."""
    codes, head = golden_drafter(case).model.transfer_codes, golden_io(case)["lm_head.weight"]
    assert codes is not None
    quick = gram_difference(codes, head, quick=True)
    assert quick < 1e-3
    assert abs(quick - gram_difference(codes, head)) < 1e-3
    other = torch.randn(head.shape, generator=torch.Generator().manual_seed(3))
    assert gram_difference(codes, other, quick=True) > 0.1
    assert gram_difference(codes, torch.zeros_like(head), quick=True) == float("inf")


def test_warning_quotes_the_exact_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick difference above half the tolerance is settled in float64: it alone decides."""
    from dspine_export.model import loading

    codes, head = golden_drafter("b8_gqa").model.transfer_codes, golden_io("b8_gqa")["lm_head.weight"]
    assert codes is not None
    monkeypatch.setattr(loading, "gram_difference", lambda *rest, quick=False: 0.015 if quick else 0.019)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loading.warn_of_foreign_codes(codes, head)
    monkeypatch.setattr(loading, "gram_difference", lambda *rest, quick=False: 0.015 if quick else 0.0211)
    with pytest.warns(UserWarning, match=r"differ by 0\.0211"):
        loading.warn_of_foreign_codes(codes, head)


def test_probe(head: torch.Tensor) -> None:
    codes = transfer_codes(head, 12)
    config = declared(codes, (0, 7, 119), 12)
    assert torch.equal(recompute_codes(config, head), codes)
    assert probe_error(codes, (500,), ((0.0,) * 8,)) == float("inf")
    with pytest.raises(CheckpointError, match="do not reproduce the checkpoint's probe"):
        recompute_codes(config, torch.randn(120, 24, generator=torch.Generator().manual_seed(9)))
    flipped = declared(codes * torch.tensor([-1.0] + [1.0] * 11), (0, 7, 119), 12)
    with pytest.raises(CheckpointError, match="probe"):
        recompute_codes(flipped, head)


@pytest.mark.parametrize("missing", ["basis", "probe", "other basis"])
def test_undeclared_basis_is_refused(head: torch.Tensor, missing: str) -> None:
    config = declared(transfer_codes(head, 12), (1,), 12)
    basis = {"basis": None, "probe": config.basis, "other basis": "svd-float32"}[missing]
    probe = None if missing == "probe" else config.probe
    with pytest.raises(CheckpointError, match="does not say how to recompute") as caught:
        recompute_codes(TransferConfig(12, 4, 4, basis, probe), head)
    assert CANONICAL_TRANSFER_BASIS in str(caught.value)


def write_without_codes(case: str, folder: Path, codes: torch.Tensor) -> Path:
    """A checkpoint whose stored codes were replaced by the declaration of how to compute them."""
    config = json.loads((drafter_path(case) / "config.json").read_text())
    tensors = load_file(drafter_path(case) / "model.safetensors")
    del tensors["transfer_codes"]
    ids = torch.linspace(0, codes.shape[0] - 1, 32).long().tolist()
    config["dspine_config"] |= {
        "transfer_basis": CANONICAL_TRANSFER_BASIS,
        "transfer_probe": {"token_ids": ids, "components": codes[ids, :8].tolist()},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_checkpoint_without_codes(tmp_path: Path) -> None:
    """Recomputed for the declared target, refused for another one."""
    io, rank = golden_io("b8_gqa"), 32
    head = io["lm_head.weight"]
    codes = transfer_codes(head, rank)
    loaded = load_checkpoint(write_without_codes("b8_gqa", tmp_path / "drafter", codes))
    drafter = loaded.bind(embed_tokens=io["embed_tokens.weight"], lm_head=head)
    assert drafter.model.transfer_codes is not None and torch.equal(drafter.model.transfer_codes, codes)
    with pytest.raises(CheckpointError, match="another target"):
        loaded.bind(embed_tokens=io["embed_tokens.weight"], lm_head=torch.randn_like(head))


def test_stored_codes_win_and_a_foreign_head_is_warned_about() -> None:
    io = golden_io("b8_gqa")
    loaded = load_checkpoint(drafter_path("b8_gqa"))
    with pytest.warns(UserWarning, match="trained for another target"):
        drafter = loaded.bind(embed_tokens=io["embed_tokens.weight"], lm_head=torch.randn_like(io["lm_head.weight"]))
    stored = golden_drafter("b8_gqa").model.transfer_codes
    assert stored is not None and drafter.model.transfer_codes is not None
    assert torch.equal(drafter.model.transfer_codes, stored)
    with pytest.warns(UserWarning, match="trained for another target"):
        loaded.bind(embed_tokens=io["embed_tokens.weight"], lm_head=torch.zeros_like(io["lm_head.weight"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded.bind(embed_tokens=io["embed_tokens.weight"], lm_head=io["lm_head.weight"])
