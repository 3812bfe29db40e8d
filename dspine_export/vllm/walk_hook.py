"""vLLM before 0.33 samples a DSpark block in a loop of its own; from 0.33 on it asks the draft model first. Older ones learn it here."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from dspine_export.vllm.older_vllm import choose_the_backbone
from dspine_export.vllm.versions import release_for

_DFLASH = "vllm.model_executor.models.qwen3_dflash"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.dspark.speculator"
_MARK = "asks_the_model"


def install_walk_hook() -> None:
    """Wrap ``DSparkSpeculator._sample_sequential`` once: a model with ``sample_sequential`` is asked, all others are sampled as before."""
    release = release_for(importlib.import_module("vllm").__version__)
    if release is not None and release.asks_the_model:
        return
    if release is not None and release.is_older:
        choose_the_backbone(importlib.import_module(_DFLASH))
    speculator: Any = importlib.import_module(_SPECULATOR).DSparkSpeculator
    original = speculator._sample_sequential
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def _sample_sequential(self: Any, num_reqs: int, head_hidden: Any) -> None:
        ask = getattr(self.model, "sample_sequential", None)
        if ask is None or not ask(self, num_reqs, head_hidden):
            original(self, num_reqs, head_hidden)

    setattr(_sample_sequential, _MARK, True)
    speculator._sample_sequential = _sample_sequential
