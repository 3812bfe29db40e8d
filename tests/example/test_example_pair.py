"""The shipped pair: the drafter's files and card agree, and the target comes out of the GGUF as the drafter expects it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspine_export import example, load_checkpoint
from dspine_export.errors import DependencyError, OutputError
from dspine_export.model.transfer import probe_error, transfer_codes

ROOT = Path(__file__).parents[2]
DRAFTER = ROOT / "recipes" / "example" / "drafter"
RESULTS = ROOT / "tools" / "results" / "train_example.json"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    try:
        example.find_example_gguf()
    except DependencyError as error:
        pytest.skip(error.what)
    return example.materialise_example_target(tmp_path_factory.mktemp("example") / "target")


def test_drafter_size_and_shape() -> None:
    loaded = load_checkpoint(DRAFTER)
    stored = sum(file.stat().st_size for file in DRAFTER.glob("*.safetensors"))
    assert stored <= 24_000_000
    config = loaded.config
    assert (config.block_size, config.num_layers, config.hidden_size) == (8, 4, 576)
    assert config.transfer is not None
    assert (config.transfer.rank, config.transfer.message_size, config.transfer.top_k) == (256, 128, 16)
    assert loaded.checkpoint.codes is None, "the codes are recomputed, not shipped"


def test_card_states_the_measured_numbers() -> None:
    card, results = (DRAFTER / "README.md").read_text(), json.loads(RESULTS.read_text())
    table = results["acceptance"]["variants"]
    for name, both in table["full"].items():
        numbers = [both["all"]["tau"], both["no_loops"]["tau"]]
        numbers += [table[v][name]["no_loops"]["tau"] for v in ("without_refinement", "without_injection_and_refinement")]
        label = {"all": "all", "gsm8k": "GSM8K", "humaneval": "HumanEval", "math500": "MATH-500", "mbpp": "MBPP", "mt-bench": "MT-Bench"}
        line = next(line for line in card.splitlines() if line.startswith(f"| {label[name]}"))
        cells = [float(cell) for i, cell in enumerate(line.strip("| ").split("|")) if i in (2, 4, 5, 6)]
        assert cells == pytest.approx(numbers, abs=0.0051), name
    assert f"{results['training']['arguments']['steps']:,} steps" in card
    assert f"{results['corpus']['sequences']:,} sequences" in card


def test_acceptance_bar() -> None:
    table = json.loads(RESULTS.read_text())["acceptance"]["variants"]
    for subset in ("all", "no_loops"):
        full = table["full"]["all"][subset]["tau"]
        assert full >= 2.0
        assert full > table["without_injection_and_refinement"]["all"][subset]["tau"]


def test_recomputed_codes_reproduce_the_probe(target: Path) -> None:
    head = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    transfer = load_checkpoint(DRAFTER).config.transfer
    assert transfer is not None
    assert transfer.probe is not None
    for dtype in (torch.bfloat16, torch.float32):
        codes = transfer_codes(head.to(dtype), transfer.rank)
        assert probe_error(codes, transfer.probe.token_ids, transfer.probe.components) < 1e-5


def test_tokenizer_and_special_tokens(target: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    for text in ("Hello 12345 wörld\n\n  def f(x):\n\treturn x**2 🙂", "1,024 apples", "    indented\r\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("2026")["input_ids"]) == ["2", "0", "2", "6"]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(chat)["input_ids"][0] == 1, "<|im_start|> is one token"


def test_target_answers_sensibly(target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == torch.bfloat16
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    answer = model.float().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])


def test_second_call_returns_the_same_directory(target: Path) -> None:
    before = (target / "model.safetensors").stat().st_mtime_ns
    assert example.materialise_example_target(target) == target
    assert (target / "model.safetensors").stat().st_mtime_ns == before
    assert not [path for path in target.parent.iterdir() if path != target], "nothing is left beside it"


def test_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OutputError, match="already in use"):
        example.materialise_example_target(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(example, "GGUF_PACKAGE", "no_such_package")
    with pytest.raises(DependencyError, match=r"example"):
        example.materialise_example_target(tmp_path / "t")
    assert not list(tmp_path.iterdir())
