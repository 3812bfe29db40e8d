"""What is added to vLLM 0.26, on stand-ins for its classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dspine_export.vllm.older_vllm import choose_the_backbone, reserve_the_anchor


@pytest.mark.parametrize(("architecture", "slots"), [("DSpineDraftModel", 8), ("Qwen3DSparkModel", 7), (None, 7)])
def test_a_slot_for_the_anchor(architecture: str | None, slots: int) -> None:
    class Scheduler:
        def __init__(self, vllm_config: Any, log_stats: bool = False) -> None:
            self.num_lookahead_tokens = 7

    reserve_the_anchor(Scheduler)
    reserve_the_anchor(Scheduler)
    draft = None if architecture is None else SimpleNamespace(_architecture=architecture)
    speculative = SimpleNamespace(draft_model_config=draft, num_speculative_tokens=7)
    assert Scheduler(SimpleNamespace(speculative_config=speculative), log_stats=True).num_lookahead_tokens == slots
    assert Scheduler(SimpleNamespace(speculative_config=None)).num_lookahead_tokens == 7


def test_subclasses_choose_their_backbone() -> None:
    module: Any = SimpleNamespace()

    class Stock:
        pass

    class ForCausalLM:
        def __init__(self, *, vllm_config: Any) -> None:
            self.model = module.DFlashQwen3Model()

    module.DFlashQwen3Model, module.DFlashQwen3ForCausalLM = Stock, ForCausalLM
    choose_the_backbone(module)

    class Own(ForCausalLM):
        class model_cls:
            pass

    assert isinstance(Own(vllm_config=None).model, Own.model_cls)
    assert isinstance(ForCausalLM(vllm_config=None).model, Stock)
    assert module.DFlashQwen3Model is Stock
