"""Stub of the built-in DSpark draft model, which registers itself and must lose against an external one."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode

from .modeling_dflash import DFlashForCausalLM
from .modeling_utils import register_draft_model


class GQADSparkForCausalLM(DFlashForCausalLM):
    @property
    def has_markov_head(self) -> bool:
        return True

    def apply_markov_chain_logits(
        self, base_logits: Any, first_prev_tokens: Any, argmax_fn: Any = None, vocab_slice: Any = None
    ) -> Any:
        raise NotImplementedError


@register_draft_model(SpeculativeDecodingMode.DSPARK)
def build_dspark(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
    raise NotImplementedError("the stub's built-in DSpark model")
