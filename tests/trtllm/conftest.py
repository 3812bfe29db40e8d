"""The package under contract (the real TensorRT-LLM where it is importable, else the stub), and one bundle made of a golden case."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspine_export.bundle import Bundle, Manifest, inventory, open_bundle, staged_bundle, write_manifest
from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.lowering.onnx_export import export_onnx
from dspine_export.lowering.onnx_session import OnnxSession
from dspine_export.model.drafter import Drafter
from dspine_export.model.loading import load_checkpoint
from dspine_export.pipeline.progress import Silent
from dspine_export.pipeline.request import BuildRequest
from dspine_export.pipeline.sources import copy_drafter, summarise
from dspine_export.pipeline.trtllm import write_trtllm
from dspine_export.recipes import Recipe, apply_overrides

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is imported

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "b8_gqa"
STUB = Path(__file__).parent / "stub"


@dataclass(frozen=True)
class Package:
    """The tests are the same for stub and real package; the stub runs on the CPU unless a test asks for a GPU."""

    module: ModuleType
    is_stub: bool
    device: str

    def load(self, name: str) -> ModuleType:
        return importlib.import_module(f"tensorrt_llm.{name}")


def forget_modules() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("tensorrt_llm", "dspine_trtllm", "trtllm")]:
        del sys.modules[name]


@pytest.fixture
def package() -> Iterator[Package]:
    """tensorrt_llm, fresh: registrations do not leak from test to test."""
    try:
        module = importlib.import_module("tensorrt_llm")
        is_stub = False
    except ImportError:
        sys.path.insert(0, str(STUB))
        module, is_stub = importlib.import_module("tensorrt_llm"), True
    try:
        yield Package(module, is_stub, "cpu" if is_stub else "cuda")
    finally:
        if is_stub:
            sys.path.remove(str(STUB))
            forget_modules()


def write_target(folder: Path, embed: torch.Tensor, head: torch.Tensor) -> Path:
    folder.mkdir()
    save_file({"model.embed_tokens.weight": embed, "lm_head.weight": head}, folder / "model.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": head.shape[1],
        "vocab_size": head.shape[0],
        "num_hidden_layers": 8,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Tables:
    """The target's two matrices."""

    embed_tokens: torch.Tensor
    lm_head: torch.Tensor


@pytest.fixture(scope="session")
def tables() -> Tables:
    case = load_file(GOLDEN / "io.safetensors")
    return Tables(case["embed_tokens.weight"], case["lm_head.weight"])


@pytest.fixture(scope="session")
def request_of_build(tmp_path_factory: pytest.TempPathFactory, tables: Tables) -> BuildRequest:
    """A float32 build of the golden drafter."""
    folder = tmp_path_factory.mktemp("trtllm")
    shutil.copytree(GOLDEN / "drafter", folder / "drafter")
    target = write_target(folder / "target", tables.embed_tokens, tables.lm_head)
    sizes = ["profile.context={min: 1, opt: 32, max: 96}", "profile.tokens={min: 1, opt: 8, max: 64}"]
    recipe = apply_overrides(Recipe(), [*sizes, "verification.enabled=false"], dtype="float32", max_batch_size=4)
    return BuildRequest(folder / "drafter", target, folder / "out", recipe)


@pytest.fixture(scope="session")
def shared_bundle(request_of_build: BuildRequest) -> Bundle:
    """The bundle without the graphs, whose export takes most of a build and is tested elsewhere."""
    request, progress = request_of_build, Silent()
    checkpoint = open_checkpoint(request.checkpoint)
    with staged_bundle(request.output) as staging:
        sources, copied = copy_drafter(checkpoint, staging)
        drafter = summarise(checkpoint)
        write_trtllm(staging, request.output, drafter, request.recipe, [], progress, request.target_model)
        fields = {"recipe": request.recipe, "drafter": drafter, "sources": tuple(sources), "versions": {}}
        write_manifest(staging, Manifest(**fields, files=inventory(staging, copied)))
    return open_bundle(request.output)


@pytest.fixture(scope="session")
def draft_graph(request_of_build: BuildRequest) -> OnnxSession:
    """The exported draft entry, portable form, in ONNX Runtime."""
    folder = request_of_build.output.with_name("portable")
    export_onnx(open_checkpoint(request_of_build.checkpoint), None, folder, dtype="float32", form="portable")
    return OnnxSession(folder / "draft.onnx")


@pytest.fixture
def reference(tables: Tables) -> Drafter:
    return load_checkpoint(GOLDEN / "drafter").bind(
        embed_tokens=tables.embed_tokens, lm_head=tables.lm_head, check_codes=False
    )
