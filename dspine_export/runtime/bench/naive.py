"""The pass as one would write it first: the eager model with torch.topk, to be captured as it is or after torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dspine_export.model.drafter import Drafter
from dspine_export.model.state import DraftState
from dspine_export.model.transition import walk


def naive_pass(drafter: Drafter, state: DraftState, anchors: Tensor) -> Callable[[], Tensor]:
    """One greedy draft pass over `state` -> tokens int64 [N, B-1]."""
    model, transfer = drafter.model, drafter.config.transfer
    heat = torch.zeros(state.batch, device=anchors.device)
    uniforms = torch.zeros(state.batch, drafter.config.block_size - 1, device=anchors.device)

    def run() -> Tensor:
        states = model.block_states(anchors, state.keys, state.values, state.lengths, drafter.embed_tokens)
        logits = states.hidden[:, 1:] @ drafter.lm_head.T
        if transfer is None:
            return logits.argmax(-1)
        ids = torch.topk(logits, transfer.top_k, dim=-1).indices
        return walk(model.transition_scores(states, anchors, ids, drafter.lm_head), ids, heat, uniforms)[0]

    return run


def compiled(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same through torch.compile, for these shapes."""
    torch._dynamo.reset()  # recompilations are limited per process
    return torch.compile(run, dynamic=False)
