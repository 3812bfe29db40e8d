"""The preflight refuses a build that would be killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspine_export.errors import DependencyError, OutputError
from dspine_export.lowering.engine import memory


def test_too_large_a_plan_is_refused_with_both_amounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 6_000_000_000)
    memory.check_memory(1_500_000_000, what="x")
    with pytest.raises(DependencyError, match=r"(?s)6\.00 GB available.*7\.76 GB.*--stop-after onnx") as caught:
        memory.check_memory(2_300_000_000, what="the engine")
    assert caught.value.exit_code == 4


def test_unknown_memory_does_not_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: None)
    memory.check_memory(1 << 50, what="x")


def test_available_memory_is_plausible() -> None:
    assert 50_000_000 < (memory.available_memory_bytes() or 0) < 1 << 50


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 100\n"}, 400),
        ({"memory.max": "max", "memory.current": "700", "memory.stat": ""}, None),
        ({"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "500", "memory/memory.stat": ""}, 400),
        (
            {
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
                "memory/memory.usage_in_bytes": "5",
                "memory/memory.stat": "",
            },
            None,
        ),
        ({}, None),
    ],
    ids=["v2", "v2 unlimited", "v1", "v1 unlimited", "none"],
)
def test_control_group_limit(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory._cgroup_headroom(tmp_path) == expected


def test_disk(tmp_path: Path) -> None:
    memory.check_disk(1, tmp_path)
    with pytest.raises(OutputError, match="disk space"):
        memory.check_disk(1 << 60, tmp_path)


def test_peak_follows_an_allocation() -> None:
    memory.reset_peak_rss()
    before = memory.peak_rss_bytes()
    block = bytearray(b"x") * 80_000_000
    assert memory.peak_rss_bytes() - before > 60_000_000
    del block
