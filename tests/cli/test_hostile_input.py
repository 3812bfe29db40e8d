"""Names, values and places meant to break the messages themselves: each ends in one printable explanation and its exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import Invoke, Outcome

CONTROL = "\x1b]0;title\x07\x1b[2J\u202e\u009b31m"


def dry_run(invoke: Invoke, pair: Path, *options: str | Path, output: str | Path | None = None) -> Outcome:
    named = ["build", pair / "drafter", "--target-model", pair / "target", "-o", output or pair / "out"]
    return invoke(*named, "--target", "onnx", "--dry-run", *options)


def edit_target(pair: Path, **changes: object) -> None:
    path = pair / "target" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def damage_target(pair: Path, name: str, value: float) -> None:
    path = pair / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors[name][3, 5] = value
    save_file(tensors, path)


def assert_printable(outcome: Outcome) -> None:
    assert all(character.isprintable() or character in "\n\t" for character in outcome.out + outcome.err)


def test_control_characters_in_file_names(pair: Path, invoke: Invoke) -> None:
    weights = pair / "drafter" / "model.safetensors"
    weights.rename(weights.with_name(f"{CONTROL}.safetensors"))
    found = invoke("inspect", pair / "drafter")
    assert found.code == 0 and r"\x1b]0;title\x07" in found.out
    assert_printable(found)
    (pair / "drafter" / "other.safetensors").write_bytes(b"")
    refused = invoke("inspect", pair / "drafter")
    assert refused.code == 3 and r"\x1b]0;title\x07" in refused.err
    assert_printable(refused)


def test_control_characters_in_a_result(pair: Path, invoke: Invoke) -> None:
    edit_target(pair, architectures=[CONTROL])
    outcome = dry_run(invoke, pair)
    assert outcome.code == 0 and r"\x1b[2J" in outcome.out
    assert_printable(outcome)


TARGET: dict[str, tuple[Callable[[Path], None], str]] = {
    "architectures is a number": (lambda pair: edit_target(pair, architectures=3), "architectures"),
    "NaN in the head": (lambda pair: damage_target(pair, "lm_head.weight", float("nan")), "lm_head.weight"),
    "infinite embedding": (
        lambda pair: damage_target(pair, "model.embed_tokens.weight", float("inf")),
        "embed_tokens",
    ),
}


@pytest.mark.parametrize("case", TARGET)
def test_damaged_target(case: str, pair: Path, invoke: Invoke) -> None:
    damage, named = TARGET[case]
    damage(pair)
    outcome = dry_run(invoke, pair)
    assert outcome.code == 3, outcome.err
    assert named in outcome.err


OPTIONS = {
    "tag that does not fit": ("--set", "profile.batch.min=!!int x"),
    "nested too deeply": ("--set", "name=" + "[" * 3000),
    "control characters": ("--set", f"{CONTROL}=1"),
    "recipe name too long": ("--recipe", "x" * 5000),
    "empty recipe name": ("--recipe", ""),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_hostile_option(case: str, pair: Path, invoke: Invoke) -> None:
    outcome = dry_run(invoke, pair, *OPTIONS[case])
    assert outcome.code == 2, outcome.err
    assert_printable(outcome)


@pytest.mark.parametrize("data", [b"name: \xff\xfe", "name: x".encode("utf-16")], ids=["bytes", "utf-16"])
def test_recipe_in_another_encoding(data: bytes, pair: Path, invoke: Invoke) -> None:
    (pair / "recipe.yaml").write_bytes(data)
    outcome = dry_run(invoke, pair, "--recipe", pair / "recipe.yaml")
    assert outcome.code == 2 and "recipe.yaml" in outcome.err


def looped(pair: Path) -> Path:
    (pair / "loop").symlink_to("loop")
    return pair / "loop"


OUTPUTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "name too long": (lambda pair: pair / ("x" * 300), "too long"),
    "name too long for its siblings": (lambda pair: pair / ("x" * 250), "too long"),
    "below a file": (lambda pair: pair / "drafter" / "config.json" / "out", "not a directory"),
    "loop of links": (looped, "symbolic links"),
    "undecodable": (lambda pair: Path(os.fsdecode(os.fsencode(pair) + b"/\xff")), "UTF-8"),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_impossible_output(case: str, pair: Path, invoke: Invoke) -> None:
    """Known before anything is built, so a dry run says it as well."""
    make, named = OUTPUTS[case]
    output = make(pair)
    before = sorted(pair.rglob("*"))
    outcome = dry_run(invoke, pair, output=output)
    assert outcome.code == 7, outcome.err
    assert named in outcome.err
    assert_printable(outcome)
    assert sorted(pair.rglob("*")) == before


@pytest.mark.parametrize("name", ["ö ü 🙂", "out/", "new/er/out"])
def test_unusual_output(name: str, pair: Path, invoke: Invoke) -> None:
    assert dry_run(invoke, pair, output=f"{pair}/{name}").code == 0


def test_our_warnings_are_shown(pair: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of another head run, and are silently slow: the command line must not swallow the model layer's warning."""
    from dspine_export.model.loading import warn_of_foreign_codes
    from dspine_export.pipeline import inspect

    codes = load_file(pair / "drafter" / "model.safetensors")["transfer_codes"]
    head = torch.randn(codes.shape[0], 64, generator=torch.Generator().manual_seed(1))
    original = inspect.describe
    monkeypatch.setattr(inspect, "describe", lambda found: warn_of_foreign_codes(codes, head) or original(found))
    outcome = invoke("inspect", pair / "drafter")
    assert outcome.code == 0
    assert outcome.err.count("warning: transfer_codes do not belong to this lm_head") == 1
