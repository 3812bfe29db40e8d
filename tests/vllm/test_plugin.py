"""The plugin in vLLM's process: it never raises, refuses what it does not know, steps aside, and leaves everything else alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import vllm
import vllm.config.speculative
import vllm.engine.arg_utils
from vllm.model_executor.models import ModelRegistry

import dspine_export.vllm as adapter
from dspine_export.vllm import plugin as installer
from dspine_export.vllm.signatures import Hook, compare, live_signature
from dspine_export.vllm.versions import RELEASES, known_versions, release_for

from .conftest import ENVIRONMENT, ROOT, Configure

Host = SimpleNamespace


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A stand-in for ``EngineArgs`` with vLLM's signatures, installed in its place; ``host.make(**options)`` creates an engine."""

    class EngineArgs:
        speculative_config: Any = None
        spec_method = spec_model = spec_tokens = None
        model, load_format, tokenizer = "target", "auto", None

        @staticmethod
        def add_cli_args(parser: Any) -> Any:
            return parser

        def create_speculative_config(self, target_model_config: Any, target_parallel_config: Any) -> Any:
            return SimpleNamespace(options=self.speculative_config)

        def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> Any:
            return SimpleNamespace(speculative_config=self.create_speculative_config(None, None))

    def make(**options: Any) -> Any:
        arguments = EngineArgs()
        arguments.speculative_config = options or None
        return arguments.create_engine_config()

    monkeypatch.setattr(vllm.engine.arg_utils, "EngineArgs", EngineArgs)
    return Host(EngineArgs=EngineArgs, make=make)


def refused(host: Host, *words: str) -> None:
    with pytest.raises(ValueError, match="dspine") as caught:
        host.make(method="dspine", model="drafter")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert host.make(method="ngram").speculative_config.options == {"method": "ngram"}
    assert host.make().speculative_config.options is None


def test_registered_as_entry_point() -> None:
    from importlib.metadata import entry_points

    assert entry_points(group="vllm.general_plugins")["dspine"].load() is adapter.register


def test_unknown_version_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.47.1")
    adapter.register()
    refused(host, "vLLM 0.47.1", "0.32 (run)", "0.26 (signature-checked)", "DSPINE_VLLM_ALLOW_UNCHECKED=1")


def test_unknown_version_on_request(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.47.1")
    monkeypatch.setenv("DSPINE_VLLM_ALLOW_UNCHECKED", "1")
    adapter.register()
    with pytest.raises(
        ValueError, match=r"vLLM 0\.47\.1|drafter"
    ):  # as the newest release: its hooks, then the drafter
        host.make(method="dspine", model="drafter")


@pytest.mark.parametrize("name", ["create_speculative_config", "create_engine_config", "add_cli_args"])
def test_replaced_hook_that_moved(name: str, host: Host) -> None:
    original = getattr(host.EngineArgs, name)
    moved: Callable[..., Any] = lambda *args, extra=None, **kwargs: original(*args, **kwargs)  # noqa: E731
    setattr(host.EngineArgs, name, staticmethod(moved) if name == "add_cli_args" else moved)
    adapter.register()
    refused(host, f"EngineArgs.{name}", "(*args, extra=, **kwargs)")


def test_hook_of_the_workers_that_moved(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Hook("v1.worker.gpu.spec_decode.dspark.speculator:DSparkSpeculator._sample_in_parallel", "(self)")
    release = RELEASES[-1].__class__("0.32", "run", (*RELEASES[1].hooks, gone))
    monkeypatch.setattr(installer, "require_release", lambda version: release)
    adapter.register()
    refused(host, "_sample_in_parallel(self): found nothing", "newer dspine-export")


def test_steps_aside_for_a_native_dspine(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm.config.speculative, "SpeculativeMethod", Literal["eagle"] | Literal["dflash", "dspine"])
    original = host.EngineArgs.create_speculative_config
    with caplog.at_level("INFO", "vllm.dspine_export"):
        adapter.register()
    assert host.EngineArgs.create_speculative_config is original
    assert any("steps aside" in record.message for record in caplog.records)


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)
    adapter.register()
    assert any("not available" in record.message for record in caplog.records)


def test_registering_twice_changes_nothing(host: Host) -> None:
    adapter.register()
    once = host.EngineArgs.create_speculative_config, host.EngineArgs.create_engine_config
    adapter.register()
    assert once == (host.EngineArgs.create_speculative_config, host.EngineArgs.create_engine_config)


def test_installed_vllm_has_the_hooks() -> None:
    release = release_for(vllm.__version__)
    assert release is not None, known_versions()
    assert not compare(release.hooks, Path(vllm.__file__).parent)


def test_signatures_are_read_alike_from_sources_and_objects(tmp_path: Path) -> None:
    text = "class A:\n    def f(self, a, b=1, *, c, d=2, **e): ...\n    def g(x, /, *y): ...\n"
    (tmp_path / "m.py").write_text(text)
    space: dict[str, Any] = {}
    exec(text, space)
    for name in ("f", "g"):
        hook = Hook(f"m:A.{name}", live_signature(getattr(space["A"], name)))
        assert not compare([hook], tmp_path), hook
    assert [moved.found for moved in compare([Hook("m:A.h", "()"), Hook("n:f", "()")], tmp_path)] == [
        "nothing",
        "no module",
    ]


OPTIONS = [None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}]
STOCK = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from tests.vllm.test_plugin import fingerprint
print(json.dumps([fingerprint(EngineArgs(**given).create_engine_config()) for given in json.loads(sys.argv[1])]))
"""


def fingerprint(config: Any) -> list[str]:
    """What an engine is started with, and the hash that vLLM keys its compiled graphs by."""
    return [config.compute_hash(), repr(config.speculative_config), repr(config.scheduler_config)]


def test_unused_plugin_changes_nothing(pair: Any, configure: Configure) -> None:
    arguments = [
        {
            "model": str(pair.target), "skip_tokenizer_init": True, "block_size": 32, "max_model_len": 256, "dtype": "float32",
            "enforce_eager": True, "speculative_config": options,
        }
        for options in OPTIONS
    ]  # fmt: skip
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    stock = subprocess.run(
        [sys.executable, "-c", STOCK, json.dumps(arguments)],
        env={**os.environ, **ENVIRONMENT, "VLLM_PLUGINS": "dspine_triton_cpu", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert json.loads(stock.stdout.splitlines()[-1]) == [fingerprint(configure(options)) for options in OPTIONS]


def test_the_model_is_registered_and_loads(plugin: None) -> None:
    assert "DSpineDraftModel" in ModelRegistry.get_supported_archs()
    assert ModelRegistry.models["DSpineDraftModel"].load_model_cls().__module__ == "dspine_export.vllm.draft_model"
