"""``dspine-export run``: text, counters and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.runtime.pairs import Pair, write_drafter, write_target

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def runnable(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A byte-level pair whose target has a tokenizer and a chat template."""
    from dspine_export.runtime.load_target import open_target
    from tests.runtime.pairs import write_byte_tokenizer

    folder = tmp_path_factory.mktemp("runnable")
    target = write_target(folder / "target", vocab_size=260, eos_token_id=256, initializer_range=0.2)
    write_byte_tokenizer(target)
    return Pair(target, write_drafter(folder / "drafter", target, open_target(target, ()).lm_head))


def test_compared_with_the_target_alone(cli: Cli, runnable: Pair) -> None:
    result = cli(
        "run",
        runnable.drafter,
        "--target-model",
        runnable.target,
        "-p",
        "hi",
        "--max-new-tokens",
        "12",
        "--compare",
        "--json",
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["ok"] and document["comparison"]["equal"] and document["executor"] == "torch"
    assert len(document["token_ids"]) == 12 and document["finish_reason"] == "length"
    assert document["statistics"]["committed_tokens"] == 11 >= document["statistics"]["target_calls"]


def test_prints_text_then_counters(cli: Cli, runnable: Pair) -> None:
    options = ("--max-new-tokens", "9", "--raw", "--temperature", "0.8", "--seed", "4")
    result = cli("run", runnable.drafter, "--target-model", runnable.target, "--prompt", "hello", *options)
    assert result.returncode == 0, result.stderr
    assert "acceptance length (tau)" in result.stdout and "per position" in result.stdout
    assert result.stdout.index("tokens        9") > 0


def test_target_of_other_weights(cli: Cli, runnable: Pair, tmp_path: Path) -> None:
    """Same sizes, another head: it runs and stays lossless, and the user is told why it is slow."""
    from tests.runtime.pairs import write_byte_tokenizer

    other = write_target(tmp_path / "other", vocab_size=260, eos_token_id=256, initializer_range=0.2, seed=7)
    write_byte_tokenizer(other)
    result = cli("run", runnable.drafter, "--target-model", other, "-p", "hi", "--max-new-tokens", "4", "--compare")
    assert result.returncode == 0, result.stderr
    assert "transfer_codes do not belong to this lm_head" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("-p", "x"), 2, "needs the target"),
        (("--target-model", "{target}"), 2, "nothing on standard input"),
        (("--target-model", "{target}", "-p", ""), 0, ""),
        (("--target-model", "{target}", "-p", "", "--raw"), 2, "prompt is empty"),
        (("--target-model", "{target}", "-p", "x", "--compare", "--temperature", "1"), 2, "Only greedy"),
        (("--target-model", "{target}", "-p", "x", "--max-new-tokens", "0"), 2, "max_new_tokens"),
        (("--target-model", "{target}", "-p", "x", "--temperature", "nan"), 2, "temperature"),
        (("--target-model", "{target}", "-p", "x", "--temperature", "1e-40"), 2, "1e-30 and more"),
        (("--target-model", "{target}", "-p", "x" * 300), 2, "256 positions"),
        (("--target-model", "{target}", "-p", "x", "--device", "meta"), 2, "cpu or cuda"),
        (("--target-model", "{target}", "-p", "x", "--executor", "tensorrt"), 2, "compiled bundles"),
        (("--target-model", "{target}", "-p", "x", "--device", "cuda"), 4, "CUDA"),
        (("--target-model", "{nowhere}", "-p", "x"), 3, "nowhere"),
    ],
)
def test_exit_codes(cli: Cli, runnable: Pair, tmp_path: Path, arguments: tuple[str, ...], code: int, says: str) -> None:
    named = [a.format(target=runnable.target, nowhere=tmp_path / "nowhere") for a in arguments]
    result = cli("run", runnable.drafter, *named, *(() if "--max-new-tokens" in named else ("--max-new-tokens", "2")))
    assert result.returncode == code, result.stderr
    assert says in result.stderr and "Traceback" not in result.stderr
