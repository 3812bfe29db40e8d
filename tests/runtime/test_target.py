"""The embedded target against transformers' own model, cache and generation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dspine_export.errors import CheckpointError, DependencyError, UsageError
from dspine_export.runtime.generate import generate_plain
from dspine_export.runtime.load_target import open_target
from tests.runtime.conftest import Opened
from tests.runtime.pairs import Pair, write_target

PROMPT = [5, 9, 33, 60, 2, 17, 21]


def hf_model(path: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).eval()


def tapped(path: Path, taps: tuple[int, ...], prompt: list[int]) -> torch.Tensor:
    target = open_target(path, taps)
    pieces: list[torch.Tensor] = []
    state = target.new_state(1, len(prompt))
    target.prefill(state, [prompt], lambda hidden, counts: pieces.append(hidden[:, : int(counts[0])]))
    return torch.cat(pieces, dim=1)[0]


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_taps_are_layer_outputs(tmp_path: Path, model_type: str) -> None:
    path = write_target(tmp_path / "t", model_type=model_type)
    with torch.no_grad():
        states = hf_model(path)(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    hidden = tapped(path, (2, 0, 3), PROMPT).split(32, dim=-1)
    torch.testing.assert_close(hidden[0], states[3][0])
    torch.testing.assert_close(hidden[1], states[1][0])
    assert not torch.allclose(hidden[0], states[2][0], atol=1e-2), "off by one"
    last = hidden[2]  # transformers norms its final entry; the tap is taken before that
    assert not torch.allclose(last, states[4][0], atol=1e-2)
    norm = open_target(path, ()).model.model.norm
    torch.testing.assert_close(norm(last), states[4][0])


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_plain_generation_equals_transformers(tmp_path: Path, model_type: str) -> None:
    path = write_target(tmp_path / "t", model_type=model_type)
    want = hf_model(path).generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False)[0, len(PROMPT) :]  # type: ignore[operator]
    assert generate_plain(open_target(path, (1,)), PROMPT, max_new_tokens=24).token_ids == want.tolist()


def test_verify_does_not_depend_on_how_tokens_arrived(tiny: Opened) -> None:
    """Ragged batch, chunked blocks with a rollback in between: the same logits as one pass over the whole text."""
    target, _ = tiny
    texts = [[3, 1, 4, 1, 5, 9, 2, 6], [200, 7, 99]]
    state = target.new_state(2, 32)
    target.prefill(state, texts, lambda _hidden, _counts: None)
    target.verify(state, torch.tensor([[8, 8, 8], [8, 8, 8]]))  # rejected as a whole
    target.commit(state, torch.tensor([0, 0]))
    target.verify(state, torch.tensor([[11, 50, 60], [12, 13, 70]]))
    target.commit(state, torch.tensor([1, 2]))
    logits = target.verify(state, torch.tensor([[21, 22], [31, 32]])).logits
    model = hf_model(Path(target.config._name_or_path))
    for row, text in enumerate(([*texts[0], 11, 21, 22], [*texts[1], 12, 13, 31, 32])):
        with torch.no_grad():
            torch.testing.assert_close(logits[row], model(torch.tensor([text])).logits[0, -2:], atol=1e-4, rtol=1e-4)


def test_long_prompt_in_pieces(tiny: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = tiny
    prompts = [list(range(1, 30)), list(range(60, 68)), [9] * 16]

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        rows: list[list[torch.Tensor]] = [[], [], []]

        def sink(hidden: torch.Tensor, counts: torch.Tensor) -> None:
            for row, count in enumerate(counts.tolist()):
                rows[row].append(hidden[row, :count])

        logits = target.prefill(target.new_state(3, 40), prompts, sink)
        return logits, [torch.cat(parts) for parts in rows]

    whole = run()
    monkeypatch.setattr("dspine_export.runtime.target.PREFILL_CHUNK_TOKENS", 8)
    pieces = run()
    torch.testing.assert_close(pieces[0], whole[0], atol=1e-4, rtol=1e-4)
    for piece, one, prompt in zip(pieces[1], whole[1], prompts, strict=True):
        assert piece.shape[0] == len(prompt)
        torch.testing.assert_close(piece, one, atol=1e-4, rtol=1e-4)


def test_refusals(tiny_pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="beyond the target's depth"):
        open_target(tiny_pair.target, (4,))
    with pytest.raises(UsageError, match="dtype"):
        open_target(tiny_pair.target, (), dtype="float16")
    with pytest.raises(UsageError, match="device"):
        open_target(tiny_pair.target, (), device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(DependencyError, match="CUDA"):
            open_target(tiny_pair.target, (), device="cuda")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "Llama and Qwen3"),
        ({"num_hidden_layers": 5, "layer_types": None}, "misses tensors"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rolled back"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None},
            "full attention only",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_unsupported_targets(tiny_pair: Pair, tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = shutil.copytree(tiny_pair.target, tmp_path / "t")
    config = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(CheckpointError, match=says):
        open_target(path, ())
