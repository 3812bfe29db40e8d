"""What a caller can get wrong is refused with an explanation, never with a traceback from inside torch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspine_export import load_checkpoint
from dspine_export.errors import CheckpointError, DependencyError, DspineError, UsageError
from dspine_export.model.drafter import Drafter
from tests.golden_cases import drafter_path, golden_drafter, golden_io

CASE = "b8_gqa"
N, WIDTH, VOCAB, BLOCK = 3, 3 * 64, 320, 8


@pytest.fixture
def drafter() -> Drafter:
    return golden_drafter(CASE)


def tables(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    io = golden_io(CASE)
    return {"embed_tokens": io["embed_tokens.weight"], "lm_head": io["lm_head.weight"]} | changes


def arguments(**changes: object) -> dict[str, object]:
    io = golden_io(CASE)
    return {name: io[name] for name in ("anchor_ids", "target_hidden", "context_lengths")} | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head": torch.zeros(VOCAB + 1, 64)}, r"\[321, 64\]"),
        ({"embed_tokens": torch.zeros(VOCAB, 32)}, r"\[320, 32\]"),
        ({"embed_tokens": torch.zeros(VOCAB)}, "embed_tokens"),
        ({"lm_head": torch.zeros(VOCAB, 64).half()}, "float16"),
        ({"lm_head": torch.zeros(VOCAB, 64, dtype=torch.int64)}, "int64"),
        ({"lm_head": torch.zeros(VOCAB, 64).bfloat16()}, "differ in dtype"),
        ({"lm_head": torch.full((VOCAB, 64), float("nan"))}, "NaN or infinity"),
        ({"embed_tokens": torch.full((VOCAB, 64), float("-inf"))}, "NaN or infinity"),
        ({"embed_tokens": torch.empty(VOCAB, 64, device="meta")}, "dense tensor"),
        ({"lm_head": torch.ones(VOCAB, 64).to_sparse()}, "dense tensor"),
        ({"lm_head": None}, "NoneType"),
    ],
)
def test_bind(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(drafter_path(CASE)).bind(**tables(**change))


def test_float16_says_what_to_do() -> None:
    half = {name: tensor.half() for name, tensor in tables().items()}
    with pytest.raises(CheckpointError, match="convert to bfloat16 or float32"):
        load_checkpoint(drafter_path(CASE)).bind(**half)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden": torch.zeros(N, 4, WIDTH + 1)}, r"outputs of target layers 1, 3, 5"),
        ({"target_hidden": torch.zeros(N, WIDTH)}, "wrong shape"),
        ({"target_hidden": torch.zeros(N + 1, 4, WIDTH)}, "wrong shape"),
        ({"context_lengths": torch.tensor([1, 1])}, "wrong shape"),
        ({"context_lengths": torch.tensor(1)}, "wrong shape"),
        ({"context_lengths": torch.tensor([1, 1, -1])}, r"integers in 0 \.\. "),
        ({"context_lengths": torch.tensor([1, 1, 10**6])}, "do not fit"),
        ({"context_lengths": torch.tensor([1.0, 1.0, 1.0])}, "integers"),
        ({"anchor_ids": torch.tensor([0, 1, VOCAB])}, r"0 \.\. 319"),
        ({"anchor_ids": torch.tensor([0, 1, -1])}, "outside the vocabulary"),
        ({"anchor_ids": torch.tensor([0, 1])}, r"integers \[3\]"),
        ({"anchor_ids": torch.tensor([[0], [1], [2]])}, "Wrong anchors"),
        ({"anchor_ids": torch.tensor([0.0, 1.0, 2.0])}, "float32"),
        ({"anchor_ids": torch.tensor([True, True, False])}, "bool"),
        ({"anchor_ids": None}, "anchor_ids"),
        ({"context_lengths": torch.tensor([True, True, False])}, "bool"),
        ({"context_lengths": "abc"}, "context_lengths"),
        ({"target_hidden": None}, "Not hidden states"),
        ({"target_hidden": torch.zeros(N, 4, WIDTH, dtype=torch.int64)}, "int64"),
        ({"target_hidden": torch.zeros(N, 4, WIDTH, device="meta")}, "Not hidden states"),
        ({"target_hidden": torch.zeros(0, 4, WIDTH), "context_lengths": torch.zeros(0, dtype=torch.int64)}, "batch 0"),
        ({"temperature": 1e-40}, "greedy"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1j}, "temperature"),
        ({"temperature": 1.0, "generator": 3}, "Not a generator"),
        ({"temperature": -1.0}, "not negative"),
        ({"temperature": float("nan")}, "finite"),
        ({"temperature": torch.tensor([1.0, 1.0])}, r"a number or \[3\]"),
    ],
)
def test_draft(drafter: Drafter, change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        drafter.draft(**arguments(**change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("uniforms", "message"),
    [
        (torch.zeros(N, BLOCK), "uniforms"),
        (torch.ones(N, BLOCK - 1), "below 1"),
        (torch.full((N, BLOCK - 1), -0.1), "at least 0"),
        (torch.full((N, BLOCK - 1), float("nan")), "range"),
    ],
)
def test_uniforms(drafter: Drafter, uniforms: torch.Tensor, message: str) -> None:
    state = drafter.new_state(N, 1)
    with pytest.raises(UsageError, match=message):
        drafter.draft_from(state, torch.zeros(N, dtype=torch.int64), temperature=1.0, uniforms=uniforms)


def test_hidden_states_that_are_not_finite(drafter: Drafter) -> None:
    """Named by sequence and row where they count; ignored where they do not."""
    hidden, lengths = golden_io(CASE)["target_hidden"], golden_io(CASE)["context_lengths"]
    expected = drafter.draft(**arguments()).tokens  # type: ignore[arg-type]
    padded = hidden.clone()
    for row, length in enumerate(lengths.tolist()):
        padded[row, length:] = float("nan")
    assert torch.equal(drafter.draft(**arguments(target_hidden=padded)).tokens, expected)  # type: ignore[arg-type]
    padded[1, 2, 7] = float("inf")
    state = drafter.new_state(N, hidden.shape[1])
    with pytest.raises(UsageError, match="sequence 1, row 2"):
        drafter.append_context(state, padded, lengths)
    assert state.lengths.tolist() == [0, 0, 0]


def test_state_of_another_drafter(drafter: Drafter) -> None:
    foreign = golden_drafter("b4_mha_k1").new_state(N, 4)
    for call in (
        lambda: drafter.draft_from(foreign, torch.zeros(N, dtype=torch.int64)),
        lambda: drafter.append_context(foreign, torch.zeros(N, 1, WIDTH), torch.ones(N, dtype=torch.int64)),
        lambda: drafter.truncate(None, torch.zeros(N, dtype=torch.int64)),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match="not a state of this drafter"):
            call()


def test_state_made_in_inference_mode(drafter: Drafter) -> None:
    with torch.inference_mode():
        state = drafter.new_state(N, 20)
        drafter.append_context(state, golden_io(CASE)["target_hidden"], golden_io(CASE)["context_lengths"])
    drafter.truncate(state, state.lengths - 1)
    drafter.append_context(state, golden_io(CASE)["target_hidden"][:, :1], torch.ones(N, dtype=torch.int64))
    assert drafter.draft_from(state, torch.zeros(N, dtype=torch.int64)).tokens.shape == (N, BLOCK - 1)


def test_other_layouts_of_the_same_values(drafter: Drafter) -> None:
    given = arguments()
    hidden, expected = given["target_hidden"], drafter.draft(**given).tokens  # type: ignore[arg-type]
    assert isinstance(hidden, torch.Tensor)
    changed = {
        "target_hidden": hidden.transpose(0, 1).contiguous().transpose(0, 1).double().requires_grad_(),
        "anchor_ids": golden_io(CASE)["anchor_ids"].int(),
        "context_lengths": golden_io(CASE)["context_lengths"].tolist(),
    }
    with torch.enable_grad():
        found = drafter.draft(**changed)  # type: ignore[arg-type]
    assert torch.equal(found.tokens, expected) and not found.transition_scores.requires_grad  # type: ignore[union-attr]


@pytest.mark.parametrize(("batch", "capacity"), [(10**9, 10**9), (2**70, 1)])
def test_cache_beyond_memory(drafter: Drafter, batch: int, capacity: int) -> None:
    with pytest.raises(DependencyError, match="memory"):
        drafter.new_state(batch, capacity)


@pytest.mark.parametrize(("batch", "capacity"), [(0, 4), (-1, 4), (1, -1), (True, 4), (1.5, 4), ("1", 4)])
def test_new_state(drafter: Drafter, batch: int, capacity: int) -> None:
    with pytest.raises(UsageError, match="cache size"):
        drafter.new_state(batch, capacity)


def test_capacity_overflow_leaves_the_state_as_it_was(drafter: Drafter) -> None:
    state = drafter.new_state(N, 5)
    hidden = golden_io(CASE)["target_hidden"][:, :4]
    drafter.append_context(state, hidden, torch.tensor([4, 2, 3]))
    keys = state.keys.clone()
    with pytest.raises(UsageError, match="at most the capacity, 5") as caught:
        drafter.append_context(state, hidden, torch.tensor([1, 1, 3]))
    assert "[5, 3, 6]" in str(caught.value)
    assert state.lengths.tolist() == [4, 2, 3] and torch.equal(state.keys, keys)


@pytest.mark.parametrize("counts", [[1, 1], [1, 1, 5], [1, 1, -1], [0.5, 1.0, 1.0]])
def test_append_counts(drafter: Drafter, counts: list[float]) -> None:
    state = drafter.new_state(N, 8)
    with pytest.raises(UsageError):
        drafter.append_context(state, golden_io(CASE)["target_hidden"][:, :4], torch.tensor(counts))


@pytest.mark.parametrize("lengths", [[4, 4, 4], [-1, 0, 0], [1, 1], 1, [1.0, 1.0, 1.0]])
def test_truncate(drafter: Drafter, lengths: object) -> None:
    state = drafter.new_state(N, 8)
    drafter.append_context(state, golden_io(CASE)["target_hidden"][:, :3], torch.tensor([3, 3, 3]))
    with pytest.raises(UsageError, match=r"can only shorten|Wrong type"):
        drafter.truncate(state, torch.tensor(lengths))
    assert state.lengths.tolist() == [3, 3, 3]


def test_drafter_weights_that_are_not_finite(tmp_path: Path) -> None:
    copied = shutil.copytree(drafter_path(CASE), tmp_path / "drafter")
    weights = load_file(copied / "model.safetensors")
    weights["fc.weight"][3, 5] = float("nan")
    save_file(weights, copied / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        load_checkpoint(copied).bind(**tables())


def test_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DspineError):
        load_checkpoint(f"{tmp_path}/nothing")


@pytest.mark.parametrize("path", [None, 7, b"drafter", {"path": "drafter"}])
def test_not_a_path(path: object) -> None:
    with pytest.raises(UsageError, match="needs a path"):
        load_checkpoint(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5000])
def test_path_that_cannot_be(path: str) -> None:
    with pytest.raises(DspineError):
        load_checkpoint(path)
