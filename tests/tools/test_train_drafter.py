"""The trainer end to end on a CPU: three steps on a tiny random target give a checkpoint that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dspine_export import load_checkpoint
from tools.train_drafter import parse_arguments, train
from tools.training.data import Corpus
from tools.training.optimiser import learning_rate
from tools.training.target import Target

SIZES = ["--steps", "3", "--sequences", "4", "--anchors", "4", "--layers", "2", "--intermediate-size", "24", "--block-size", "5"]
TRANSFER = ["--rank", "12", "--message-size", "8", "--top-k", "4", "--taps", "0", "3", "--mask-token-id", "0", "--device", "cpu"]


@pytest.mark.parametrize(
    "switches",
    [[], ["--optimiser", "adamw"], ["--no-refinement", "--no-alignment"], ["--no-injection", "--bidirectional"]],
    ids=lambda switches: " ".join(switches) or "default",
)
def test_three_steps(target_dir: Path, target: Target, corpus: Corpus, tmp_path: Path, switches: list[str]) -> None:
    corpus.save(tmp_path / "corpus.pt")
    common = ["--target", str(target_dir), "--corpus", str(tmp_path / "corpus.pt"), *SIZES, *TRANSFER, *switches]
    first = train(parse_arguments([*common, "--out", str(tmp_path / "a"), "--seed", "7"]))
    again = train(parse_arguments([*common, "--out", str(tmp_path / "b"), "--seed", "7"]))
    for (name, one), two in zip(first.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, two, msg=name)
    log = json.loads((tmp_path / "a" / "training_log.json").read_text())
    assert log["log"][-1]["step"] == 3
    assert log["arguments"]["seed"] == 7
    drafter = load_checkpoint(tmp_path / "a").bind(embed_tokens=target.embed, lm_head=target.head)
    assert drafter.config.is_dspine is ("--no-injection" not in switches)


def test_bidirectional_dspine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--target", "t", "--corpus", "c", "--out", "o", "--bidirectional"])
    assert caught.value.code == 2
    assert "causal" in capsys.readouterr().err


def test_learning_rate() -> None:
    rates = [learning_rate(step, 100, 0.1) for step in range(100)]
    assert rates[9] == pytest.approx(1.0)
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.0, abs=1e-6)
