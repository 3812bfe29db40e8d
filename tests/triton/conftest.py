"""Bundles and targets to serve. These tests need Triton's client, and most of them its server: `make test-triton` has both."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtime.pairs import write_byte_tokenizer, write_drafter, write_target

pytest.importorskip("tritonclient.grpc", reason="tests/triton runs in an environment of its own: make test-triton")

ROOT = Path(__file__).parents[2]
EXAMPLE_DRAFTER = ROOT / "recipes" / "example" / "drafter"


@dataclass(frozen=True)
class Served:
    """A bundle and its target."""

    bundle: Path
    target: Path


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Invoke = Callable[..., Outcome]


class Quiet:
    """Progress that nobody looks at."""

    @contextmanager
    def stage(self, name: str, detail: str = "") -> Iterator[None]:
        yield

    def note(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...


def build_bundle(drafter: Path, target: Path, output: Path) -> Path:
    """Graphs only, not verified: other tests do that."""
    from dspine_export.pipeline.build import build
    from dspine_export.pipeline.request import BuildRequest
    from dspine_export.recipes import Recipe, apply_overrides

    recipe = apply_overrides(Recipe(), ["verification.enabled=false"], target="trtllm", dtype="float32")
    build(BuildRequest(drafter, target, output, recipe, stop_after_onnx=True), Quiet())
    return output


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A random byte-level pair: loads at once, drafts are almost always rejected."""
    from dspine_export.runtime.load_target import open_target

    folder = tmp_path_factory.mktemp("tiny")
    target = write_target(folder / "target", vocab_size=260, eos_token_id=256, initializer_range=0.2)
    write_byte_tokenizer(target)
    drafter = write_drafter(folder / "drafter", target, open_target(target, ()).lm_head)
    return Served(build_bundle(drafter, target, folder / "bundle"), target)


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The example pair."""
    from dspine_export.example import materialise_example_target

    folder = tmp_path_factory.mktemp("example")
    target = materialise_example_target(folder / "target")
    return Served(build_bundle(EXAMPLE_DRAFTER, target, folder / "bundle"), target)


@pytest.fixture
def invoke(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run ``dspine-export`` inside this process."""
    return lambda *arguments: run_command(capfd, monkeypatch, *arguments)


def run_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> Outcome:
    import os

    from dspine_export.cli.main import main

    monkeypatch.setattr(sys, "argv", ["dspine-export", *map(str, arguments)])
    monkeypatch.setenv("DSPINE_EXPORT_DEBUG", "")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stdout = os.dup(1)
    capfd.readouterr()
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


@pytest.fixture
def made(tiny: Served, tmp_path: Path, invoke: Invoke) -> Path:
    """A repository of every flavour that the tiny pair can be served in."""
    flavors = [f"--flavor={flavor}" for flavor in ("dspine", "llmapi", "vllm")]
    output = tmp_path / "repository"
    result = invoke("triton-repo", tiny.bundle, "--target-model", tiny.target, "-o", output, *flavors)
    assert result.code == 0, result.err
    return output
