"""The drafts of a running engine with dummy weights against the torch model's, under meaningful random weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dspine_export.model.drafter import Drafter
from dspine_export.vllm.fused_support import products
from dspine_export.vllm.product_weights import is_rounded
from tools.rounded_model import rounded_activations
from tools.vllm_engine import model_runner, random_prompts, timed_batch
from tools.vllm_rounds import Recorder, compare_rounds
from tools.vllm_weights import randomise, torch_drafter

ROUNDS, PROMPT, TOKENS = 40, 96, 48
# Name of a check -> requests at a time: rows of our own products, and of the vendor's.
CHECKS = {"drafts": 4, "drafts_many_rows": 16}


def check_drafts(llm: Any, prompt: int, vocabulary: int, most: int) -> dict[str, Any]:
    """Captured drafts against the torch model in float32 from the same weights and states, by check.

    Args:
        prompt: longest prompt. most: most requests at a time that the engine was captured for.

    Returns:
        ``drafter_runs_on``: whose kernels run the drafter's layers. Per check `vllm_rounds.Agreement`. In float8 the torch model has the
        engine's rounded weights and rounds activations where the engine does; ``unrounded_activations`` is the share that it would agree
        with if it did not.
    """
    speculator = model_runner(llm).speculator
    drafter = torch_drafter(speculator.model, randomise(speculator.model))
    original = speculator.propose
    own = speculator.model.model.last_pass is not None
    found: dict[str, Any] = {"drafter_runs_on": "this package's kernels" if own else "vLLM's layers"}
    for check, requests in CHECKS.items():
        batch = min(requests, most)
        if len(found) > 1 and batch < requests:
            break
        recorder = Recorder(limit=ROUNDS)
        recorder.attach(speculator)
        timed_batch(llm, random_prompts(batch, min(prompt, PROMPT), 9, vocabulary), TOKENS)
        speculator.propose = original
        backbone = speculator.model.model
        with as_rounded(backbone, drafter, batch * backbone.block):
            found[check] = compare_rounds(drafter, recorder).as_dict()
        if is_rounded(products(backbone.layers[0])[0]):
            found[check]["unrounded_activations"] = round(compare_rounds(drafter, recorder).share, 5)
    del drafter
    torch.cuda.empty_cache()
    return found


def as_rounded(backbone: Any, drafter: Drafter, rows: int) -> AbstractContextManager[None]:
    """While it is entered, the torch model rounds activations as a pass of `rows` rows of `backbone` does."""
    if not is_rounded(products(backbone.layers[0])[0]):
        return nullcontext()
    fused = backbone.fused()
    return rounded_activations(
        drafter.model, block=fused is None or rows > fused.geometry.few, fc=is_rounded(backbone.fc)
    )
