"""Snapshots, version gate, and the comparison with whatever package is importable (the stub here, labelled so)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from dspine_export.doctor import trtllm as doctor
from dspine_export.errors import DependencyError
from dspine_export.trtllm.draft_model import DSpineForCausalLM
from dspine_export.trtllm.register import check_package
from dspine_export.trtllm.settings import ALLOW_VARIABLE
from dspine_export.trtllm.signatures import compare, plain_signature
from dspine_export.trtllm.snapshots import SNAPSHOTS
from dspine_export.trtllm.versions import require_checked, snapshot_for

from .conftest import STUB, Package

IDS = [snapshot.release for snapshot in SNAPSHOTS]


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=IDS)
def test_package_has_every_hook(package: Package, snapshot: object) -> None:
    if not package.is_stub:
        snapshot = snapshot_for(package.module.__version__)
    if snapshot is not None:
        assert [str(moved) for moved in compare(snapshot)] == []  # type: ignore[arg-type]


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=IDS)
def test_every_fact_names_its_source(snapshot: object) -> None:
    for hook in snapshot.hooks:  # type: ignore[attr-defined]
        source = hook.source
        assert source.repository
        assert source.path
        assert re.fullmatch(r"[0-9a-f]{40}", source.commit or "0" * 40)
        assert source.commit or "pull request" in source.path or source.path.endswith(".html"), hook.name


def test_our_model_answers_with_the_signatures_we_recorded() -> None:
    """What TensorRT-LLM calls on the draft model has the parameters of the snapshot, name by name and default by default."""
    implemented = [hook for hook in SNAPSHOTS[-1].hooks if hook.side == "implemented"]
    assert len(implemented) == 8
    for hook in implemented:
        ours = DSpineForCausalLM.__dict__[hook.name.rpartition(".")[2]]
        assert plain_signature(ours) == hook.signature, hook.name


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("1.3.0rc27", "1.3.0rc"),
        ("1.3.0rc29", "1.3.0rc"),
        ("1.4.0rc1", "1.4.0rc"),
        ("1.4.0.rc4", "1.4.0rc"),
        ("1.3.0rc5", None),
        ("1.3.0", None),
        ("1.2.1", None),
        ("1.5.0rc1", None),
        ("unknown", None),
    ],
)
def test_versions(version: str, release: str | None) -> None:
    found = snapshot_for(version)
    assert (found.release if found else None) == release


def test_unknown_version_is_refused_with_the_checked_ones() -> None:
    with pytest.raises(DependencyError) as raised:
        require_checked("1.5.0rc2", allow_unchecked=False)
    text = str(raised.value)
    for part in ("1.5.0rc2", "1.3.0rc27", "1.4.0rc1", "signature-checked", "--allow-unchecked"):
        assert part in text
    assert "tested" not in text
    assert require_checked("1.5.0rc2", allow_unchecked=True) is SNAPSHOTS[-1]


def test_versions_before_external_drafters_point_to_the_legacy_layout() -> None:
    with pytest.raises(DependencyError, match="--legacy-layout"):
        require_checked("1.2.1", allow_unchecked=False)
    for unreadable in ("", "main"):
        with pytest.raises(DependencyError, match="set DSPINE_TRTLLM_ALLOW_UNCHECKED=1"):
            require_checked(unreadable, allow_unchecked=False)


def test_moved_hook_is_named(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    if not package.is_stub:
        pytest.skip("alters the stub")
    worker = package.load("_torch.speculative.dspark").DSparkWorker
    monkeypatch.setattr(worker, "_refine_block_logits", lambda self, draft_model, block: block)
    with pytest.raises(DependencyError) as raised:
        check_package(allow_unchecked=False)
    assert "DSparkWorker._refine_block_logits" in str(raised.value)
    assert "(self, draft_model, block)" in str(raised.value)
    with pytest.warns(UserWarning, match="_refine_block_logits"):
        assert check_package(allow_unchecked=True) == package.module.__version__


@pytest.fixture
def installed_stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the stub that child processes find as an installed package."""
    import shutil

    shutil.copytree(STUB / "tensorrt_llm", tmp_path / "tensorrt_llm")
    metadata = tmp_path / "tensorrt_llm-1.3.0rc29.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: 1.3.0rc29\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "tensorrt_llm"


def test_doctor_compares(installed_stub: Path) -> None:
    (check,) = doctor.check_trtllm_hooks()
    assert check.status == "ok", check
    assert "signature-checked, never run" in check.detail
    assert "tested" not in check.detail


def test_doctor_names_the_hook_that_moved(installed_stub: Path) -> None:
    path = installed_stub / "_torch/models/modeling_dflash.py"
    path.write_text(path.read_text().replace("ctx_page_table: Any = None", "page_table: Any = None"))
    (check,) = doctor.check_trtllm_hooks()
    assert check.status == "warning"
    assert "DFlashForCausalLM.dflash_forward" in check.detail
    assert "page_table=None" in check.detail
    assert check.fix is not None and "1.4.0rc1" in check.fix


def test_doctor_knows_an_unchecked_version(installed_stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_TRTLLM_VERSION", "1.9.0")
    (check,) = doctor.check_trtllm_hooks()
    assert check.status == "warning"
    assert "--allow-unchecked" in str(check.fix)


def test_doctor_is_silent_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if "tensorrt_llm" in sys.modules:
        pytest.skip("TensorRT-LLM is installed")
    monkeypatch.setattr(doctor, "_installed", lambda: False)
    assert doctor.check_trtllm_hooks() == []


def test_the_environment_waives_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    from dspine_export.trtllm.versions import unchecked_allowed

    assert not unchecked_allowed(False)
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    assert unchecked_allowed(False)
