"""The benchmark's own arithmetic and table; its passes run once under Triton's interpreter with a clock that always says 5 us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is imported
pytest.importorskip("triton", reason="Triton is not installed")

from dspine_export.checkpoint.config import TransferConfig
from dspine_export.cli.main import main
from dspine_export.errors import DependencyError
from dspine_export.model.drafter import Drafter
from dspine_export.runtime.bench import cells, engines, loop, measure, timing
from dspine_export.runtime.bench.floor import Ceilings, floor_us, weight_count
from dspine_export.runtime.bench.subjects import QWEN3_8B, kinds, random_drafter
from dspine_export.runtime.bench.table import report_lines
from dspine_export.runtime.packed_weights import pack
from dspine_export.runtime.torch_executor import TorchExecutor
from tools import compare_forms
from tools.plot_bench import with_repeats

TINY = replace(
    QWEN3_8B, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=48, vocab_size=64, block_size=2,
    mask_token_id=63, target_layer_ids=(0, 2), layer_types=("full_attention",),
    transfer=TransferConfig(rank=16, message_size=8, top_k=4),
)  # fmt: skip


def test_floor_of_the_design_document() -> None:
    """0.74 and 0.76 ms at the copy rate that was measured there; batch 32 is bound by arithmetic."""
    ceilings = Ceilings(4270.0, 790.0)
    shapes = kinds(QWEN3_8B)
    assert weight_count(shapes["DFlash"]) * 2 == pytest.approx(3.17e9, rel=0.01)
    floors = {kind: floor_us(config, 1, 0, ceilings) for kind, config in shapes.items()}
    assert floors["DFlash"]["total"] == pytest.approx(742, abs=5) and floors["DSpine"]["total"] == pytest.approx(
        758, abs=5
    )
    wide = floor_us(shapes["DSpine"], 32, 2000, ceilings)
    assert wide["flop"] > wide["weights"] and wide["total"] == pytest.approx(wide["flop"] + wide["kv"])
    assert wide["kv"] == pytest.approx(32 * 2000 * 20480 / 4270e3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_a_cell_and_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_once(work: Callable[[], object], warmup: int = 0) -> Callable[[], object]:
        work()
        return work

    for module in (cells, engines):
        monkeypatch.setattr(module, "capture", run_once)
        monkeypatch.setattr(module, "replay_us", lambda _graph, samples=0: 5.0 + samples)
        monkeypatch.setattr(module, "call_us", lambda work: 9.0 if work() is not None else 0.0)
    monkeypatch.setattr(cells, "_free_bytes", lambda: 1 << 30)
    ceilings, rows = Ceilings(1000.0, 100.0), []
    subjects = {}
    for kind, config in kinds(TINY).items():
        drafter = random_drafter(config, torch.float32, "cpu")
        subjects[kind] = drafter, pack(drafter, 64)
        cell = cells.Cell(kind, 1, 8, stages=kind == "DSpine", fp8=True)
        rows.append(cells.measure_cell(cell, drafter, pack(drafter, 64), ceilings))
        assert rows[-1]["equal_tokens"] == 1.0 and rows[-1]["append_2"] == 5.0 and not rows[-1]["skipped"]
        assert rows[-1]["ours_fp8"] == 5.0 and rows[-1]["floor_fp8"]["weights"] == rows[-1]["floor"]["weights"] / 2
    cells.measure_alternately(dict(zip(subjects, rows, strict=True)), subjects)
    assert [row["alternating"] for row in rows] == [6.0, 6.0]
    engine = TorchExecutor(drafter)
    engines.measure_engine(rows[-1], "a plan", engine)
    assert rows[-1]["engine"] == {"name": "a plan", "stream": 9.0, "graph": 5.0}
    engine.max_context = 4
    engines.measure_engine(rows[0], "a plan", engine)
    assert "profile ends" in rows[0]["skipped"]["engine"]
    monkeypatch.setattr(cells, "_free_bytes", lambda: 1000)
    rows.append(cells.measure_cell(cells.Cell("DSpine", 2, 8), drafter, pack(drafter, 64), ceilings))
    assert "GB are free" in rows[-1]["skipped"]["all"]
    _no_memory_for_caches(monkeypatch, drafter, ceilings, dict(zip(subjects, rows[:2], strict=True)), subjects)
    header = {"device": "a clock", "torch": "2", "copy_gb_s": 1000.0, "gemm_tflop_s": 100.0}
    text = "\n".join(report_lines(json.loads(json.dumps({**header, "rows": rows}))))
    assert "DSpine adds 0 us (+0.0%) to DFlash at batch 1, context 8, by turns" in text and "lm_head" in text and "skipped" in text


def _no_memory_for_caches(
    monkeypatch: pytest.MonkeyPatch, drafter: Drafter, ceilings: Ceilings, rows: dict[str, cells.Row], subjects: Any
) -> None:
    """A cell whose cache cannot be had, alone or beside another's, is left out; the table goes on."""

    def refuse(*_: object) -> None:
        raise DependencyError("The context cache does not fit into memory") from torch.OutOfMemoryError()

    with monkeypatch.context() as patch:
        patch.setattr(cells, "_free_bytes", lambda: 1 << 30)
        patch.setattr(Drafter, "new_state", refuse)
        row = cells.measure_cell(cells.Cell("DSpine", 1, 8), drafter, pack(drafter, 64), ceilings)
        assert row["skipped"] == {"all": "out of GPU memory"} and "ours" not in row
        again = {kind: cells.Row(found, skipped={}) for kind, found in rows.items()}
        cells.measure_alternately(again, subjects)
        assert again["DSpine"]["skipped"] == {"alternating": "out of GPU memory"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_a_report_is_saved_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_require_gpu", lambda: (9, 0))
    monkeypatch.setattr(measure, "_rows", lambda *_: iter([[{"batch": 1}], [{"batch": 8}, {"batch": 8}]]))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a clock")
    for name in ("copy_bandwidth_gb_s", "gemm_tflop_s"):
        monkeypatch.setattr(timing, name, lambda: 1.0)
    seen: list[tuple[int, bool]] = []

    def save(report: dict[str, Any]) -> None:
        seen.append((len(report["rows"]), report.get("complete", True)))

    report = measure.run_benchmark(measure.BenchRequest(), lambda _: None, save)
    assert seen == [(1, False), (3, False), (3, True)] and len(report["rows"]) == 3
    refused = torch.OutOfMemoryError("no room")
    monkeypatch.setattr(measure, "_rows", lambda *_: (_ for _ in ()).throw(refused))
    with pytest.raises(DependencyError, match="do not fit"):
        measure.run_benchmark(measure.BenchRequest(), lambda _: None)


def test_what_a_failed_contender_held_is_let_go() -> None:
    class Held:
        pass

    kept: list[weakref.ref[Held]] = []

    def fail() -> None:
        held = Held()
        held.itself = held  # type: ignore[attr-defined]
        kept.append(weakref.ref(held))
        raise RuntimeError("does not compile\nfor reasons")

    row = cells.Row(skipped={})
    with row.measuring("a contender"):
        fail()
    assert row["skipped"] == {"a contender": "RuntimeError: does not compile"} and kept[0]() is None
    with row.measuring("an engine"):
        raise DependencyError("The plan could not be executed")
    assert "could not be executed" in row["skipped"]["an engine"]


@pytest.mark.parametrize("finished", [True, False])
def test_an_interrupt_says_what_is_there(
    finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only once something was measured is there a file, and whole."""
    out = tmp_path / "report.json"

    def run(_request: Any, _note: Any, save: Any) -> None:
        if finished:
            save({"rows": [1], "complete": False})
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "run_benchmark", run)
    monkeypatch.setattr(sys, "argv", ["dspine-export", "bench", "--out", str(out)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 130
    assert (f"so far is in {out}" in capsys.readouterr().err.replace("\n", "")) == finished
    assert [path.name for path in tmp_path.iterdir()] == (["report.json"] if finished else [])
    assert not finished or json.loads(out.read_text()) == {"rows": [1], "complete": False}


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_a_round_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "ROUNDS", 1)
    monkeypatch.setattr(loop, "SAMPLES", 1)
    assert loop.round_us(random_drafter(TINY, torch.float32, "cpu"), batch=2, context=4) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")
def test_forms_are_compared_within_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([4.0, 5.0, 4.4] * 2)
    monkeypatch.setattr(compare_forms, "capture", lambda work: work())
    monkeypatch.setattr(compare_forms, "replay_us", lambda *_, **__: next(times))
    subjects = {kind: (random_drafter(config, torch.float32, "cpu"),) for kind, config in kinds(TINY).items()}
    packed = {kind: (found[0], pack(found[0], 64, merged=kind == "DSpine")) for kind, found in subjects.items()}
    arguments = Namespace(context=8, forms=["plain", "merged"], samples=2, inner=1)
    assert compare_forms.measure_batch(arguments, 1, packed, {}) == {
        "DFlash": {"us": 4.0, "over_dflash_percent": 0.0},
        "plain": {"us": 5.0, "over_dflash_percent": 25.0, "equal_tokens": "1 of 1"},
        "merged": {"us": 4.4, "over_dflash_percent": 10.0, "equal_tokens": "1 of 1"},
    }


def test_a_figure_takes_what_was_measured_again() -> None:
    """Later numbers of a cell replace the earlier ones; what was measured only once stays."""
    cell = {"kind": "DSpine", "batch": 1, "context": 8}
    rows = [cell | {"ours": 9.0, "naive_graph": 20.0}, cell | {"batch": 2, "ours": 11.0}]
    got = with_repeats({"rows": rows, "again": {"rows": [cell | {"ours": 8.0}]}})
    assert got == [cell | {"ours": 8.0, "naive_graph": 20.0}, rows[1]]
    assert with_repeats({"rows": rows}) == rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="concerns machines without a GPU")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 4, "needs an NVIDIA GPU"),
        (["--batches", "1,x"], 2, "Not a list of sizes"),
        (["--contexts", "9" * 5000], 2, "Not a list of sizes"),
        (["--seconds", "nan"], 2, "Not a duration"),
        (["--out", "nowhere/report.json"], 7, "The report cannot be written"),
        (["--out", "."], 7, "is a directory"),
        (["nowhere"], 4, "needs an NVIDIA GPU"),
    ],
)
def test_command(arguments: list[str], code: int, words: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dspine_export", "bench", "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == code and words in result.stderr
    assert json.loads(result.stdout)["exit_code"] == code
