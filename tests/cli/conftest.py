"""A tiny drafter with a matching target directory, and the command as a subprocess."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "b8_gqa"
TARGET_LAYERS = 8


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Invoke = Callable[..., Outcome]
Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
COMMAND = [sys.executable, "-m", "dspine_export"]


@pytest.fixture(scope="session")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``drafter`` (a golden case's) and ``target`` (the matrices that case was computed with)."""
    folder = tmp_path_factory.mktemp("pair")
    shutil.copytree(GOLDEN / "drafter", folder / "drafter")
    case = load_file(GOLDEN / "io.safetensors")
    weights: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": case["embed_tokens.weight"],
        "lm_head.weight": case["lm_head.weight"],
    }
    target = folder / "target"
    target.mkdir()
    save_file(weights, target / "model.safetensors")
    vocab, hidden = weights["lm_head.weight"].shape
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": TARGET_LAYERS,
        "tie_word_embeddings": False,
    }
    (target / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def pair(shared_pair: Path, tmp_path: Path) -> Path:
    """A private copy of the pair, to damage."""
    return shutil.copytree(shared_pair, tmp_path / "pair")


@pytest.fixture(scope="session")
def cli() -> Cli:
    """Run ``dspine-export`` with arguments; never on a terminal."""

    def run(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> Result:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            cwd=cwd or ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    return run


@pytest.fixture
def invoke(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run ``dspine-export`` inside this process, where torch is already imported."""

    def run(*arguments: str | Path) -> Outcome:
        from dspine_export.cli.main import main

        monkeypatch.setattr(sys, "argv", ["dspine-export", *map(str, arguments)])
        monkeypatch.setenv("DSPINE_EXPORT_DEBUG", "")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        stdout = os.dup(1)
        try:
            with pytest.raises(SystemExit) as leave:
                main()
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = capfd.readouterr()
        return Outcome(leave.value.code if isinstance(leave.value.code, int) else 0, out, err)

    return run
