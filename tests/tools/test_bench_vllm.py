"""What the vLLM benchmarks do without an engine: files, names, prompts, merged tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspine_export.checkpoint.parse_config import parse_config
from tools import bench_vllm, bench_vllm_pair
from tools.vllm_engine import Timed, random_prompts

EXAMPLE = Path(__file__).parents[2] / "recipes/example/drafter"


def test_the_drafter_of_the_benchmark_has_a_valid_configuration(tmp_path: Path) -> None:
    shape = bench_vllm.SHAPES["qwen3-8b"]
    _, _, dspine = bench_vllm.model_files(tmp_path, shape, "bfloat16")
    config = parse_config(json.loads((dspine / "config.json").read_text()), "config.json", {}, False, [])
    assert config.transfer is not None
    assert (config.block_size, config.transfer.rank, config.transfer.message_size) == (16, 1024, 512)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)


def test_table_relates_dspine_to_dflash(tmp_path: Path) -> None:
    for name, length, speed in (("dflash", 3.77, 100.0), ("dspine", 4.82, 125.0), ("none", None, 40.0)):
        rows = [{"batch": 8, "synthetic_length": length, "tokens_per_s": speed}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    found = json.loads(bench_vllm.table(tmp_path))["tokens_per_s"]["8"]
    assert found == {"dspine(4.82)": 125.0, "dflash(3.77)": 100.0, "none": 40.0, "dspine(4.82) / dflash(3.77)": 1.25}
    for name, length, speed in (("dflash-fp8", 3.77, 110.0), ("dspine-fp8", 4.82, 132.0)):
        rows = [{"batch": 8, "synthetic_length": length, "tokens_per_s": speed}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    found = json.loads(bench_vllm.table(tmp_path))["tokens_per_s"]["8"]
    ratios = {name: value for name, value in found.items() if " / " in name and "fp8" in name}
    assert ratios == {
        "dspine-fp8(4.82) / dflash(3.77)": 1.32, "dspine-fp8(4.82) / dflash-fp8(3.77)": 1.2, "dflash-fp8(3.77) / dflash(3.77)": 1.1,
    }  # fmt: skip


def test_what_was_drawn_is_taken_out() -> None:
    """Two runs of 2 requests at 10 ms a step, whose realised lengths lie around the nominal one."""
    prefill, step, runs = 0.5, 0.01, []
    for length in (3.5, 4.5):
        seconds = prefill + 100 / length * step
        runs.append(Timed(seconds, tokens=202, acceptance_length=length, outputs=[]))
    found = bench_vllm.at_length(runs, 2, prefill, 4.0)
    assert found == {"step_ms": 10.0, "tokens_per_s_at_length": round(202 / (prefill + 25 * step), 1)}
    undrafted = Timed(9.0, tokens=202, acceptance_length=None, outputs=[])
    assert bench_vllm.at_length([*runs, undrafted], 2, prefill, 4.0) == found
    assert bench_vllm.at_length([undrafted, Timed(0.5, tokens=2, acceptance_length=3.0, outputs=[])], 2, prefill, 4.0) == {}


def test_pair_table_counts_equal_outputs(tmp_path: Path) -> None:
    for name, speed, outputs in (("target", 10.0, [[1, 2], [3]]), ("dspine", 20.0, [[1, 2], [4]])):
        rows = [{"batch": 1, "tokens_per_s": speed}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows, "outputs": outputs}))
    found = json.loads(bench_vllm_pair.table(tmp_path))["dspine"]
    assert found["speed_up"] == {"1": 2.0}
    assert found["outputs_equal"] == "1 of 2"


def test_drafters_are_named_by_how_they_are_served(tmp_path: Path) -> None:
    assert bench_vllm_pair.method_of(EXAMPLE) == ("dspine", 7)
    assert list(bench_vllm_pair.labels([EXAMPLE, EXAMPLE])) == ["dspine", "dspine-2"]
    assert bench_vllm_pair.labels([EXAMPLE], ["fp8"]) == {"dspine": (EXAMPLE, None), "dspine-fp8": (EXAMPLE, "fp8")}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Other"], "block_size": 4}))
    with pytest.raises(SystemExit, match="expected one of"):
        bench_vllm_pair.method_of(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--out is required"),
        (["--table", "nowhere"], "expected a directory with results"),
        (["--out", "x", "--batches", "0"], "positive numbers"),
        (["--out", "x", "--engine", "{bad"], "not JSON"),
        (["--out", "x", "--engine", "[1]"], "expected an object"),
    ],
)
def test_mistakes_are_told_at_once(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_vllm.parse_arguments(arguments)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "dspine.json").write_text('{"rows": [')
    with pytest.raises(SystemExit, match=r"dspine\.json is not a result"):
        bench_vllm.table(tmp_path)


def test_prompts_depend_on_their_arguments_alone() -> None:
    assert random_prompts(2, 5, 3, 151936) == random_prompts(2, 5, 3, 151936)
    assert random_prompts(1, 5, 3, 151936) != random_prompts(1, 5, 4, 151936)
    assert max(random_prompts(4, 50, 1, 64)[0]["prompt_token_ids"]) < 64
