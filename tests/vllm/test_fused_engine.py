"""The drafter's layers on this package's kernels inside a real engine: on a GPU in bfloat16 and graphs, on a CPU in the interpreter.

vLLM's CPU attention keeps its own order inside a page; of the drafter's cache only our kernels read and write there, so it serves.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM; make test-vllm installs it")

from vllm.model_executor.layers import utils as layer_utils

from dspine_export import load_checkpoint
from dspine_export.vllm import draft_model, fused_support
from tests.runtime.pairs import Pair
from tests.vllm.engines import ON_GPU, engine, generate
from tests.vllm.pairs import write_noisy_pair
from tools.vllm_engine import model_runner
from tools.vllm_rounds import Recorder, compare_rounds

TOKENS = 12


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_noisy_pair(tmp_path_factory.mktemp("fused"))


def _without_a_matrix(backbone: Any, _: int) -> str | None:
    """What is left of `fused_support.obstacle` on a CPU: what vLLM builds last."""
    return None if isinstance(getattr(backbone, "_fused_kv_weight", None), Tensor) else "no matrix"


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the switch; on a CPU, where vLLM repacks weights for its products, they are kept as they are."""
    monkeypatch.setenv(fused_support.SWITCH, "1")
    if not ON_GPU:
        keep = functools.partial(layer_utils.dispatch_cpu_unquantized_gemm, remove_weight=False)
        monkeypatch.setattr(layer_utils, "dispatch_cpu_unquantized_gemm", lambda layer, **_: keep(layer))
        monkeypatch.setattr(draft_model, "obstacle", _without_a_matrix)


@pytest.mark.usefixtures("forced")
def test_drafts_equal_the_torch_model(noisy: Pair) -> None:
    """Ten prompts over four slots, prefill in chunks of 64, rounds of fewer requests than slots; on a CPU lossless as well."""
    source = random.Random(5)
    prompts = [[source.randrange(48) for _ in range(3 + 11 * index)] for index in range(10)]
    options = {
        "dtype": "bfloat16" if ON_GPU else "float32",
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 64,
    }
    with engine(noisy.target, dtype=options["dtype"]) as llm:
        alone = generate(llm, prompts, TOKENS)
    with engine(noisy.target, noisy.drafter, **options) as llm:
        recorder = Recorder(limit=60)
        speculator = model_runner(llm).speculator
        recorder.attach(speculator)
        outputs = generate(llm, prompts, TOKENS)
        own = speculator.model.model.last_pass
        made = speculator.model.model.fused()
    assert made is not None
    assert own is not None
    if not ON_GPU:  # ties of bfloat16 flip a target's own tokens
        assert outputs == alone
    weights = load_file(noisy.target / "model.safetensors")
    device = "cuda" if ON_GPU else "cpu"
    embed, head = (weights[name].to(device) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    found = compare_rounds(load_checkpoint(noisy.drafter).bind(embed_tokens=embed, lm_head=head), recorder)
    assert found.rounds >= 30
    if ON_GPU:
        assert found.share > 0.9, (
            found.as_dict()
        )  # in bfloat16; `tools.bench_vllm` looks at the margins of a model of real size
    else:
        assert found.equal == found.tokens, found.as_dict()


@pytest.mark.usefixtures("forced")
def test_weights_that_are_never_loaded_run_on_our_kernels_too(noisy: Pair) -> None:
    """vLLM joins dummy weights later than loaded ones, after it first projected tapped states; nothing may be decided before."""
    with engine(noisy.target, noisy.drafter, dtype="bfloat16" if ON_GPU else "float32", load_format="dummy") as llm:
        backbone = model_runner(llm).speculator.model.model
        generate(llm, [[3, 5, 8]], 4)
        assert backbone.last_pass is not None


def test_what_stands_in_the_way_is_named(noisy: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's layers run where ours may not, and the reason is at hand."""
    monkeypatch.setenv(fused_support.SWITCH, "0")
    with engine(noisy.target, noisy.drafter) as llm:
        backbone = model_runner(llm).speculator.model.model
        assert backbone.fused() is None
        assert fused_support.obstacle(backbone, 1) == "DSPINE_VLLM_FUSED=0"
        monkeypatch.setenv(fused_support.SWITCH, "1")
        reason = fused_support.obstacle(backbone, 1)
        assert reason is not None
        assert ("float32" if ON_GPU else "NVIDIA") in reason
        assert backbone.last_pass is None
        if not ON_GPU:
            assert any("CPUAttentionBackendImpl" in one for one in fused_support._differences(backbone))
