"""The lab end to end on a tiny target, and the pieces its comparison rests on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dspine_export.checkpoint.load import open_checkpoint
from tools import acceptance_lab
from tools.training import lab_measure, lab_slots
from tools.training.arms import ARMS, LADDER, Starts, arm_shape
from tools.training.bootstrap import Resampler, pooled
from tools.training.data import Corpus, load_corpus
from tools.training.drafter import DrafterShape, DraftPass
from tools.training.graph_optimiser import GraphOptimiser
from tools.training.lockstep import make_inputs, ordered_batches
from tools.training.objective import Objective, ObjectiveConfig, Targets
from tools.training.optimiser import advance, build_optimisers
from tools.training.target import Target

SIZES = ["--sequences", "4", "--anchors", "3", "--layers", "2", "--intermediate-size", "24", "--block-size", "5", "--widths", "32", "64"]
HEADS = ["--top-k", "4", "--message-size", "8", "--head-rank", "6", "--taps", "0", "3", "--mask-token-id", "0"]
COMMON = ["--rank", "12", "--device", "cpu"]


def lab(*words: object) -> None:
    acceptance_lab.main([str(word) for word in words])


def fake_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [("one", [1, 5, 9]), ("one", [1, 7, 30, 44, 8]), ("two", [4, 4, 61]), ("two", [9, 3, 50])]
    for module in (lab_measure, lab_slots):
        monkeypatch.setattr(module, "load_prompt_sets", lambda a: ([n for n, _ in sets], [p for _, p in sets]))


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
    lab("slots", *measured, "--only", *"cde")
    lab("compare", "--out", tmp_path / "lab", "--result", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert list(result["arms"]) == list(LADDER)
    assert result["exactness"]["e1"]["greedy"]["equal"] == 4
    assert result["training"]["arguments"]["corpus"] == "corpus.xz"
    assert str(tmp_path) not in json.dumps(result)
    assert result["bar"]["t0"]["best_ancestor"] in "bcd"
    slots = result["slots_at_temperature_1"]
    assert slots.keys() == {"c1", "d1", "e1"}
    for name, kind in (("c1", "markov"), ("d1", "lattice, K=16"), ("e1", "lattice, K=64")):
        assert len(slots[name][kind]) == 4
        assert all(0 < value <= 1 for value in slots[name][kind])
    assert slots["e1"]["lattice, K=16"] < slots["e1"]["mass of K=16"] < slots["e1"]["mass of K=64"]
    assert {"value", "low", "high"} == set(result["bar"]["t1"]["e-a"])
    assert result["bar_without_loops"]["t1"]["prompts"] <= 4
    assert result["arms"]["a"]["t0"]["per_set"].keys() == {"one", "two"}
    texts = {json.dumps(result["arms"][letter]["t0"]["distinct_1_to_4"]) for letter in LADDER}
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


def test_split_arms_learn_what_they_learn_together(target_dir: Path, corpus: Corpus, tmp_path: Path) -> None:
    corpus.save(tmp_path / "corpus.pt")
    where = ["--target", target_dir, *COMMON, "--corpus", tmp_path / "corpus.pt", *SIZES, *HEADS, "--steps", 3]
    lab("train", *where, "--out", tmp_path / "joint", "--arms", *"acel")
    for letters in ("ca", "le"):
        lab("train", *where, "--out", tmp_path / "split", "--arms", *letters)
    for letter in "acel":
        one, two = (tmp_path / kind / f"{letter}1" / "drafter.safetensors" for kind in ("joint", "split"))
        assert one.read_bytes() == two.read_bytes(), letter


def test_variants_and_other_numbers_of_candidates(
    target_dir: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_prompts(monkeypatch)
    corpus.save(tmp_path / "corpus.pt")
    where = ["--target", target_dir, "--out", tmp_path / "lab", *COMMON]
    lab("train", *where, "--corpus", tmp_path / "corpus.pt", *SIZES, *HEADS, "--steps", 2, "--arms", *"acekl")
    measured = [*where, "--prompts", "unused", "--max-new-tokens", 10]
    lab("measure", *measured, "--only", *"ac", "--seeds", 1)
    lab("measure", *measured)
    before = json.loads((tmp_path / "lab/e1/measured.json").read_text())
    lab("measure", *measured, "--candidates", 8)
    after = json.loads((tmp_path / "lab/e1/measured.json").read_text())
    assert after.keys() - before.keys() == {"t0_k8", "t1_k8"}
    assert all(after[name] == value for name, value in before.items())
    assert "t1_k8" not in json.loads((tmp_path / "lab/c1/measured.json").read_text())
    (tmp_path / "lab/a2").mkdir()  # an arm whose measuring was cut off is left out
    for name in ("arm.json", "measured.json"):
        content = json.loads((tmp_path / "lab/a1" / name).read_text())
        content.pop("t1", None)
        (tmp_path / "lab/a2" / name).write_text(json.dumps(content))
    lab("compare", "--out", tmp_path / "lab", "--result", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["arms"]["a"]["seeds"] == [1]
    assert result["bar"]["t1_k8"]["proposals"] == {"a": "t1", "c": "t1", "e": "t1_k8", "k": "t1_k8", "l": "t1_k8"}
    assert result["variants"]["l"]["t1_public"]["best_ancestor"] == "c"
    assert {"k-a", "k-c", "k-e", "k-best"} <= result["variants"]["k"]["t0"].keys()


def test_training_goes_on_from_a_checkpoint(target_dir: Path, corpus: Corpus, tmp_path: Path) -> None:
    corpus.save(tmp_path / "corpus.pt")
    where = ["--target", target_dir, *COMMON, "--corpus", tmp_path / "corpus.pt", *SIZES, *HEADS, "--arms", "e"]
    lab("train", *where, "--out", tmp_path / "first", "--steps", 2)
    ready = tmp_path / "first/e1/checkpoint"
    lab("train", *where, "--out", tmp_path / "second", "--steps", 1, "--init", ready, "--lr", 1e-9)
    old, new = (load_file(tmp_path / kind / "e1/drafter.safetensors") for kind in ("first", "second"))
    for name, value in old.items():
        torch.testing.assert_close(new[name], value, atol=1e-6, rtol=1e-2)
    lab("adopt", "--target", target_dir, "--checkpoint", ready, "--folder", tmp_path / "other/e7")
    assert (tmp_path / "other/e7/drafter.safetensors").read_bytes() != b""
    for name, value in load_file(tmp_path / "other/e7/drafter.safetensors").items():
        assert torch.equal(value, old[name]), name
    with pytest.raises(SystemExit, match="cannot be continued"):
        lab("train", *where, "--out", tmp_path / "third", "--steps", 1, "--init", ready, "--message-size", 4)


def test_whole_target_counts_what_the_candidates_miss(target: Target, shape: DrafterShape) -> None:
    drafter = Starts(target, shape.rank).build(shape, 1)
    rows, generator = 5, torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 1, rows + 1, shape.hidden_size, generator=generator)
    output = DraftPass(drafter.norm(hidden), hidden, [])
    teacher = torch.rand(rows, shape.vocab_size, generator=generator).softmax(-1)
    targets = Targets(torch.arange(rows), torch.arange(rows) + 1, torch.ones(rows), teacher)
    candidates = torch.arange(40, 45).expand(rows, -1)  # no label among them: no CE
    losses = [
        Objective(ObjectiveConfig(whole=whole), target.head)._refinement(drafter, output, candidates, targets)[0]
        for whole in (False, True)
    ]
    q = torch.zeros_like(teacher)
    refined = drafter.refine(hidden[0, 0, 1:], targets.predecessors).float()
    q[:, 40:45] = (refined @ target.head[40:45].float().T).softmax(-1)
    torch.testing.assert_close(losses[1], 0.9 * (q - teacher).abs().sum(-1), atol=1e-5, rtol=1e-4)
    assert (losses[1] > losses[0]).all()


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
    for one, two in zip(whole[-8:], first(3), strict=True):
        assert torch.equal(one, two)
    assert {t.shape[1] for t in whole[::8]} <= {32, 64}


def test_compressed_corpus(corpus: Corpus, tmp_path: Path) -> None:
    corpus.save(tmp_path / "corpus.xz")
    again = load_corpus(tmp_path / "corpus.xz")
    for name in ("tokens", "offsets", "prompts"):
        assert torch.equal(getattr(again, name), getattr(corpus, name)), name


def test_draws_that_miss_a_set_leave_it_out() -> None:
    resampler = Resampler(["x"] * 10 + ["y"] * 10)
    calls = np.array([1.0] * 10 + [1.0] + [0.0] * 9)  # one answer of y counts: a third of the draws miss it
    interval = resampler.arm(2 * calls, calls)
    assert (interval.low, interval.value, interval.high) == (2.0, 2.0, 2.0)


def test_a_checkpoint_on_its_own_is_compared_with_itself(tmp_path: Path) -> None:
    answer = {"calls": 10, "committed": 20, "whole": 9, "kept": [10], "covered": [10], "oracle": 10, "looped": True}
    settings = {name: {"distinct": [0.5], "answers": [answer] * 4} for name in ("t0", "t1", "t1_argmax", "t0_k64", "t1_k64")}
    folder = tmp_path / "lab" / "e0"
    folder.mkdir(parents=True)
    measured = {"sets": ["one"] * 4, "max_new_tokens": 12, "block_size": 2, **settings}
    described = {"letter": "e", "seed": 0, "adopted": "drafter", "shape": {}}
    for name, content in (("measured.json", measured), ("arm.json", described), ("about.json", {"date": "2026-11-30"})):
        (folder / name).write_text(json.dumps(content))
    lab("compare", "--out", tmp_path / "lab", "--result", tmp_path / "result.json", "--about", folder / "about.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["date"], result["training"]["adopted"], result["dspine_passes"]) == ("2026-11-30", "drafter", None)
    assert result["arms"]["e"]["gain_of_candidates"]["t1_k64"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert result["arms"]["e"]["t0"]["tau_without_loops"] is None, "every answer loops"
    assert result["bar_without_loops"]["t0"] == {}


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
