"""vLLM on a CPU, or on a GPU where there is one: environment variables, a tiny pair, engine configurations. Run by ``make test-vllm``."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Read when vLLM is imported: one process, no network and, without a GPU, Triton's interpreter in place of its compiler.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
ON_GPU = Path(
    "/dev/nvidiactl"
).exists()  # asked of the file system: importing torch here would slow every collection down
if not ON_GPU:
    ENVIRONMENT |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TRITON_INTERPRET": "1"}
if importlib.util.find_spec("flashinfer") is None:  # vLLM 0.33 asks for its sampler without looking
    ENVIRONMENT["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
os.environ.update(ENVIRONMENT)
INSTALLED = importlib.util.find_spec("vllm") is not None
BLOCK_SIZE = 8
ROOT = Path(__file__).parents[2]

Configure = Callable[..., Any]
Edit = Callable[..., Path]


def pytest_report_header() -> str | None:
    return None if INSTALLED else "tests/vllm: not collected, vLLM is not installed here (make test-vllm)"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if INSTALLED or collection_path == Path(__file__).parent else True


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random target with a byte tokenizer and padded vocabulary, and a random SpecForge drafter for it."""
    from safetensors.torch import load_file

    from tests.runtime.pairs import Pair, write_byte_tokenizer, write_drafter, write_target

    folder = tmp_path_factory.mktemp("vllm")
    sizes = {"head_dim": 32, "max_position_embeddings": 512}
    target = write_target(folder / "target", vocab_size=320, hidden_size=64, eos_token_id=256, spread=3.0, **sizes)
    write_byte_tokenizer(target)
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    transfer = {"transfer_rank": 32, "message_size": 16, "top_k": 8}
    drafter = write_drafter(folder / "drafter", target, head, block_size=BLOCK_SIZE, dspine_config=transfer, **sizes)
    return Pair(target, drafter)


@pytest.fixture(scope="session")
def plugin() -> None:
    """The plugin as vLLM loads it."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


@pytest.fixture
def configure(pair: Any, plugin: None) -> Configure:
    """``configure(speculative_config, **engine_arguments)``: what vLLM would start, without starting it."""
    from vllm.engine.arg_utils import EngineArgs

    def make(speculative_config: dict[str, Any] | None = None, **changes: Any) -> Any:
        arguments = {
            "model": str(pair.target),
            "skip_tokenizer_init": True,
            "block_size": 32,
            "max_model_len": 256,
            "dtype": "float32",
            "enforce_eager": True,
            "speculative_config": speculative_config,
        }
        return EngineArgs(**(arguments | changes)).create_engine_config()

    return make


@pytest.fixture
def edited(tmp_path: Path) -> Edit:
    """``edited(directory, **changes)``: a copy whose config.json has other values; None removes a key."""

    def copy(directory: Path, **changes: Any) -> Path:
        folder = shutil.copytree(directory, tmp_path / f"edited-{len(list(tmp_path.iterdir()))}")
        document = json.loads((folder / "config.json").read_text()) | changes
        document = {key: value for key, value in document.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(document))
        return folder

    return copy


@pytest.fixture
def true_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own rounding to e4m3 loses carries: there the kernels write float32, and the product rounds as torch does."""
    import torch

    from dspine_export.runtime import float8

    if torch.cuda.is_available():
        return
    product = float8.scaled_product

    def rounding(x: Any, *rest: Any) -> None:
        product(x.to(torch.float8_e4m3fn).float(), *rest)

    monkeypatch.setattr(float8, "scaled_product", rounding)
    monkeypatch.setattr(float8, "NARROW", torch.float32)


@pytest.fixture(autouse=True)
def _no_registered_drafters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPINE_DRAFTERS", str(tmp_path / "drafters.yaml"))
    monkeypatch.delenv("DSPINE_DRAFTER", raising=False)
