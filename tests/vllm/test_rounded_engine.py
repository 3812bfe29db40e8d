"""``"quantization": "fp8"`` in a real engine: vLLM's layers and ours, on a GPU in graphs, on a CPU in the interpreter."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from safetensors.torch import load_file

pytest.importorskip("vllm", reason="needs vLLM; make test-vllm installs it")

from vllm.model_executor.layers import utils as layer_utils

from dspine_export.vllm import draft_model, fused_support, product_weights
from tests.runtime.pairs import Pair
from tests.vllm.engines import ON_GPU, engine, generate
from tests.vllm.pairs import write_noisy_pair
from tools.vllm_check import as_rounded
from tools.vllm_engine import model_runner
from tools.vllm_rounds import Recorder, compare_rounds
from tools.vllm_weights import torch_drafter

TOKENS = 12
SOURCE = random.Random(5)
PROMPTS = [[SOURCE.randrange(48) for _ in range(3 + 11 * index)] for index in range(10)]
DTYPE = "bfloat16" if ON_GPU else "float16"  # the interpreter computes in numpy, which knows no bfloat16
OPTIONS: dict[str, Any] = {"dtype": DTYPE, "enable_prefix_caching": False, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_noisy_pair(tmp_path_factory.mktemp("rounded"))


@pytest.fixture(scope="module")
def alone(noisy: Pair) -> list[list[int]]:
    with engine(noisy.target, dtype=DTYPE) as llm:
        return generate(llm, PROMPTS, TOKENS)


@pytest.mark.usefixtures("true_rounding")
@pytest.mark.parametrize("layers", ["vLLM's layers", "our kernels"])
def test_drafts_equal_the_torch_model_of_the_rounded_weights(
    noisy: Pair, alone: list[list[int]], layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share allows for half types and for values that round the other way."""
    ours = layers == "our kernels"
    monkeypatch.setenv(fused_support.SWITCH, str(int(ours)))
    if not ON_GPU:
        keep = functools.partial(layer_utils.dispatch_cpu_unquantized_gemm, remove_weight=False)
        monkeypatch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", lambda layer, **_: keep(layer))
        if ours:
            monkeypatch.setattr(draft_model, "obstacle", lambda *_: None)
    with engine(noisy.target, noisy.drafter, speculative={"quantization": "fp8"}, **OPTIONS) as llm:
        speculator = model_runner(llm).speculator
        recorder = Recorder(limit=60)
        recorder.attach(speculator)
        outputs = generate(llm, PROMPTS, TOKENS)
        backbone = speculator.model.model
        modules = [one for layer in backbone.layers for one in fused_support.products(layer)]
        assert all(map(product_weights.is_rounded, modules)), "qkv, o, gate_up and down of every layer"
        widths = [module.weight.shape[0] for module in modules]
        assert not list(filter(None, map(product_weights.obstacle, modules, widths)))
        assert (backbone.last_pass is not None) == ours
        codes = load_file(noisy.drafter / "model.safetensors")["transfer_codes"]
        drafter = torch_drafter(speculator.model, codes.to(backbone.norm.weight.device))
        with as_rounded(backbone, drafter, 4 * backbone.block):
            found = compare_rounds(drafter, recorder)
    assert found.rounds >= 30
    assert found.share > 0.9, found.as_dict()
    if not ON_GPU:  # ties flip a target's own tokens on a GPU
        assert outputs == alone
