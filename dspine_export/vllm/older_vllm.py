"""What vLLM 0.26 lacks and later ones have: a slot for the anchor of a block, and draft models that choose their backbone.

Checked against its sources; never run.
"""

from __future__ import annotations

import functools
from typing import Any

from dspine_export.vllm.serving_config import ARCHITECTURE

_MARK = "_dspine_export"


def reserve_the_anchor(scheduler: Any) -> None:
    """Wrap ``Scheduler.__init__``: with a DSpine drafter K + 1 slots are reserved, one for the anchor, which predicts nothing."""
    original = scheduler.__init__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def __init__(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
        if getattr(draft, "_architecture", None) == ARCHITECTURE:
            self.num_lookahead_tokens = vllm_config.speculative_config.num_speculative_tokens + 1

    setattr(__init__, _MARK, True)
    scheduler.__init__ = __init__


def choose_the_backbone(dflash: Any) -> None:
    """Wrap ``DFlashQwen3ForCausalLM.__init__`` in module ``dflash``: a subclass with ``model_cls`` gets that as its backbone."""
    original = dflash.DFlashQwen3ForCausalLM.__init__
    if hasattr(original, _MARK):
        return
    stock = dflash.DFlashQwen3Model

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        dflash.DFlashQwen3Model = getattr(self, "model_cls", stock)
        try:
            original(self, *args, **kwargs)
        finally:
            dflash.DFlashQwen3Model = stock

    setattr(__init__, _MARK, True)
    dflash.DFlashQwen3ForCausalLM.__init__ = __init__
