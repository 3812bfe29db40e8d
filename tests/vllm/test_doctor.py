"""``doctor``'s lines about vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspine_export.doctor import vllm as doctor


def lines() -> dict[str, tuple[str, str]]:
    return {check.name: (check.status, check.detail) for check in doctor.check_vllm_hooks()}


def test_installed_version() -> None:
    found = lines()
    assert found["vLLM hooks"][0] == "ok" and "hooks as in 0.3" in found["vLLM hooks"][1]
    assert found["vLLM plugin"] == ("ok", "vLLM loads it: method dspine")


def test_plugin_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    status, detail = lines()["vLLM plugin"]
    assert status == "warning" and "VLLM_PLUGINS=other" in detail


def test_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda: "0.47.0")
    status, detail = lines()["vLLM hooks"]
    assert status == "warning" and "refused" in detail


def test_moved_hooks_and_a_native_method(tmp_path: Path) -> None:
    check = doctor._check_hooks("0.33.0", tmp_path)
    assert check.status == "warning" and "add_cli_args(parser): found no module" in check.detail
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "speculative.py").write_text('SpeculativeMethod = Literal["dflash", "dspine"]\n')
    check = doctor._check_hooks("0.40.0", tmp_path)
    assert check.status == "ok" and "of its own" in check.detail


def test_nothing_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda: None)
    assert doctor.check_vllm_hooks() == []
