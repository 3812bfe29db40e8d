"""The lab end to end on a tiny target, and the pieces its comparison rests on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dspine_export.checkpoint.load import open_checkpoint
from tools import acceptance_lab
from tools.training import lab_measure
from tools.training.arms import ARMS, Starts, arm_shape
from tools.training.bootstrap import Resampler, pooled
from tools.training.data import Corpus, load_corpus
from tools.training.drafter import DrafterShape
from tools.training.graph_optimiser import GraphOptimiser
from tools.training.lockstep import make_inputs, ordered_batches
from tools.training.optimiser import advance, build_optimisers
from tools.training.target import Target

SIZES = ["--sequences", "4", "--anchors", "3", "--layers", "2", "--intermediate-size", "24", "--block-size", "5", "--widths", "32", "64"]
HEADS = ["--top-k", "4", "--message-size", "8", "--head-rank", "6", "--taps", "0", "3", "--mask-token-id", "0"]
COMMON = ["--rank", "12", "--device", "cpu"]


def lab(*words: object) -> None:
    acceptance_lab.main([str(word) for word in words])


def fake_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [("one", [1, 5, 9]), ("one", [1, 7, 30, 44, 8]), ("two", [4, 4, 61]), ("two", [9, 3, 50])]
    monkeypatch.setattr(lab_measure, "load_prompt_sets", lambda a: ([n for n, _ in sets], [p for _, p in sets]))


def test_train_measure_compare(target_dir: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_prompts(monkeypatch)
    corpus.save(tmp_path / "corpus.xz")
    where = ["--target", target_dir, "--out", tmp_path / "lab", *COMMON]
    lab("train", *where, "--corpus", tmp_path / "corpus.xz", *SIZES, *HEADS, "--steps", 3)
    assert sorted(path.parent.name for path in (tmp_path / "lab").glob("*/arm.json")) == [f"{letter}1" for letter in "abcdefgh"]
    kinds = {path.parent.name: open_checkpoint(path).config.architecture for path in (tmp_path / "lab").glob("*/checkpoint")}
    assert kinds == {"a1": "DFlashDraftModel", "b1": "DFlashDraftModel", "e1": "DSpineDraftModel"}
    measured = [*where, "--prompts", "unused", "--max-new-tokens", 12]
    lab("measure", *measured)
    lab("exact", *measured, "--only", "e", "--draws", 60)
    lab("compare", "--out", tmp_path / "lab", "--result", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result["arms"]) == sorted(ARMS)
    assert result["exactness"]["e1"]["greedy"]["equal"] == 4
    assert result["bar"]["t0"]["best_ancestor"] in "bcd"
    assert {"value", "low", "high"} == set(result["bar"]["t1"]["e-a"])
    assert result["arms"]["a"]["t0"]["per_set"].keys() == {"one", "two"}
    texts = {json.dumps(result["arms"][letter]["t0"]["distinct_1_to_4"]) for letter in ARMS}
    assert len(texts) == 1, "at temperature 0 every arm commits the same text"


def test_slices_give_the_same_weights(target_dir: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.training.lab_train.WINDOW", 1)
    corpus.save(tmp_path / "corpus.pt")
    where = ["--target", target_dir, *COMMON, "--corpus", tmp_path / "corpus.pt", *SIZES, *HEADS, "--arms", "e", "d", "--steps", 4]
    lab("train", *where, "--out", tmp_path / "whole")
    for _ in range(4):
        lab("train", *where, "--out", tmp_path / "sliced", "--slice-seconds", "1e-9")
    for name in ("d1", "e1"):
        assert (tmp_path / "whole" / name / "drafter.safetensors").read_bytes() == (
            tmp_path / "sliced" / name / "drafter.safetensors"
        ).read_bytes()
    assert not list((tmp_path / "sliced").glob("state*"))


def test_arms_start_from_one_backbone(target: Target, shape: DrafterShape) -> None:
    starts = Starts(target, shape.rank)
    built = {letter: dict(starts.build(arm_shape(arm, shape, 6), 3).named_parameters()) for letter, arm in ARMS.items()}
    for name, parameter in built["a"].items():
        assert all(torch.equal(parameter, other[name]) for other in built.values()), name


def test_optimiser_equals_torch() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(8, 16))

    one, two = model(), model()
    reference, fused = build_optimisers(one, "muon", 0.02), GraphOptimiser(two, 0.02)
    fused.dtype = torch.bfloat16
    for step in range(4):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        one(x).square().mean().backward()
        nn.utils.clip_grad_norm_(one.parameters(), 1.0)
        advance(reference, 0.5)
        fused.step(torch.autograd.grad(two(x).square().mean(), fused.parameters), torch.tensor(0.5))
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-2)  # bfloat16 orthogonalisation, batched and not


def test_batches_and_choices_follow_the_seed(corpus: Corpus) -> None:
    def first(start: int) -> list[torch.Tensor]:
        source = ordered_batches(corpus, 4, 5, (32, 64), start)
        return [t for step in range(start, 4) for t in make_inputs(next(source), 3, 5, step, 0.5, 0.1, 0.2).tensors()]

    whole = first(0)
    for one, two in zip(whole[-7:], first(3), strict=True):
        assert torch.equal(one, two)
    assert {t.shape[1] for t in whole[::7]} <= {32, 64}


def test_compressed_corpus(corpus: Corpus, tmp_path: Path) -> None:
    corpus.save(tmp_path / "corpus.xz")
    again = load_corpus(tmp_path / "corpus.xz")
    for name in ("tokens", "offsets", "prompts"):
        assert torch.equal(getattr(again, name), getattr(corpus, name)), name


def test_bootstrap_is_paired() -> None:
    rng = np.random.default_rng(0)
    calls = rng.integers(20, 60, 80)
    runs = [[{"calls": int(c), "committed": int(3 * c)} for c in calls]]
    better = [[{"calls": int(c), "committed": int(3 * c) + 4} for c in calls]]
    resampler = Resampler(["x"] * 40 + ["y"] * 40)
    gap = resampler.difference(pooled(better), pooled(runs))
    assert 0 < gap.low < gap.value < gap.high
    assert gap.value == pytest.approx(0.1, abs=0.03)
    assert resampler.arm(*pooled(runs)).low == pytest.approx(3.0)
    none = resampler.gain(pooled(runs), pooled(runs))
    assert (none.low, none.value, none.high) == (0.0, 0.0, 0.0)
