"""The commands of the README's vLLM section, executed: the build, and every way to serve up to the engine's configuration."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from .conftest import BLOCK_SIZE, ROOT

SECTION = (ROOT / "README.md").read_text().split("\n## vLLM\n")[1].split("\n## ")[0]
SHELL = [line for block in re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL) for line in block.splitlines()]
SERVE = [line for line in SHELL if "vllm serve " in line]
SIZES = {"block_size": 32, "max_model_len": 256, "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}


@pytest.fixture(scope="session")
def names(pair: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the README's words in capitals stand for; OUT is made by its build command."""
    folder = tmp_path_factory.mktemp("readme")
    words = {"DRAFTER": str(pair.drafter), "TARGET": str(pair.target), "OUT": str(folder / "out")}
    (line,) = (line for line in SHELL if line.startswith("dspine-export build"))
    command = shlex.split(filled(line, words))[1:]
    done = subprocess.run([sys.executable, "-m", "dspine_export", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return words


def filled(text: str, words: dict[str, str]) -> str:
    return re.sub(r"(?<![A-Z_])(DRAFTER|TARGET|OUT)(?![A-Z_=])", lambda found: words[found[0]], text)


def check(config: Any, words: dict[str, str], length: int) -> None:
    assert config.model_config.model == words["TARGET"]
    speculative = config.speculative_config
    assert speculative.draft_model_config._architecture == "DSpineDraftModel"
    assert Path(speculative.draft_model_config.model) == Path(words["OUT"]) / "vllm"
    assert speculative.num_speculative_tokens == length


def test_there_are_commands() -> None:
    assert len(SERVE) == 4


@pytest.mark.parametrize("line", SERVE)
def test_serve(line: str, names: dict[str, str], plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = shlex.split(filled(line, names))
    while "=" in parts[0]:
        monkeypatch.setenv(*parts.pop(0).split("=", 1))
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())  # what `vllm serve` adds to has no stable place
    given = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", *parts[2:]]))
    for name, value in SIZES.items():
        setattr(given, name, value)
    check(given.create_engine_config(), names, 5 if "--num-speculative-tokens 5" in line else BLOCK_SIZE - 1)


def test_python(names: dict[str, str], plugin: None) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    made: list[Any] = []

    class LLM:  # as vLLM's, up to the engine's configuration
        def __init__(self, **options: Any) -> None:
            made.append(EngineArgs(**options, **SIZES).create_engine_config())

    exec(filled(program, names).replace("from vllm import LLM", ""), {"LLM": LLM})
    check(made[0], names, BLOCK_SIZE - 1)


def test_file_of_drafters(names: dict[str, str]) -> None:
    environment = {**os.environ, "XDG_CONFIG_HOME": "/any/where"}
    environment.pop("DSPINE_DRAFTERS", None)
    program = "from dspine_export.vllm.drafter_lookup import registry_path; print(registry_path())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    (path,) = re.findall(r"`~(/\.config/\S+\.yaml)`", SECTION)
    assert done.stdout.strip() == path.replace("/.config", "/any/where")
