"""The second target: trained for a second, written, and read by the lab's own Qwen3 decoder as transformers reads it."""

from __future__ import annotations

import inspect
import json
import lzma
from pathlib import Path

import pytest
import torch

import tools.training.data
import tools.training.objective
from tools import pack_sources, train_target
from tools.training.prompts import encode_prompts, load_tokenizer, read_prompts
from tools.training.target import load_target

SIZES = ["--vocabulary", "400", "--hidden-size", "32", "--intermediate-size", "48", "--layers", "2", "--heads", "4", "--kv-heads", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("second")
    texts = {"train": tools.training.objective, "held_out": tools.training.data}
    with lzma.open(folder / "sources.xz", "wt", encoding="utf-8") as out:
        for split, module in texts.items():
            out.write(json.dumps({"package": split, "split": split, "text": inspect.getsource(module)}) + "\n")
    words = ["--sources", str(folder / "sources.xz"), "--out", str(folder / "target"), "--device", "cpu", *SIZES]
    train_target.main([*words, "--seconds", "0.5", "--batch", "2", "--train-prompts", "6", "--held-out-prompts", "3"])
    return folder / "target"


def test_reads_as_in_transformers(trained: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = load_target(trained, torch.device("cpu"), torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    ids = torch.randint(2, 400, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        states = reference(ids, output_hidden_states=True).hidden_states
        tapped, final = target.forward(ids, (0,))
        cache = target.new_cache(2, 32)
        target.forward(ids[:, :12], cache=cache)
        block, last = target.decode_block(ids[:, 12:], torch.tensor([12, 12]), cache, 32, (0,))
    torch.testing.assert_close(tapped, states[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(final, states[-1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(block, tapped[:, 12:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last, final[:, 12:], atol=1e-5, rtol=1e-4)


def test_prompts_stay_in_their_split(trained: Path) -> None:
    tokenizer = load_tokenizer(trained)
    files = {"train_prompts.jsonl": tools.training.objective, "prompts/held_out.jsonl": tools.training.data}
    for name, module in files.items():
        rows = read_prompts(trained / name)
        encoded = encode_prompts(tokenizer, rows)
        for row, ids in zip(rows, encoded, strict=True):
            assert row["text"] in inspect.getsource(module)
            assert 1 not in ids, "the mask token is never written"


def test_no_package_is_in_two_splits() -> None:
    assert not set(pack_sources.TRAIN) & set(pack_sources.HELD_OUT)


def test_training_starts_from_prepared_tokens(trained: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    counts = ["--seconds", "0.1", "--batch", "2", "--train-prompts", "6", "--held-out-prompts", "3"]
    words = ["--out", str(target), "--device", "cpu", *SIZES, *counts]
    train_target.main(["--sources", str(trained.parent / "sources.xz"), *words, "--prepare"])
    assert not (target / "model.safetensors").exists()
    for name in ("tokenizer.json", "train_prompts.jsonl", "tokens.xz"):
        assert (target / name).read_bytes() == (trained / name).read_bytes(), name
    train_target.main(["--sources", "gone.xz", *words])
    summary = json.loads((target / "target.json").read_text())
    assert summary["training_tokens"] == len(train_target.read_tokens(target / "tokens.xz")[0])
    assert (target / "model.safetensors").is_file()
