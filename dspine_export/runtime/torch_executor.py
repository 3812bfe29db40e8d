"""The eager torch model, which is the specification, as an executor. Runs anywhere torch does."""

from __future__ import annotations

import torch
from torch import Tensor

from dspine_export.model.drafter import Drafter
from dspine_export.model.output import DraftOutput
from dspine_export.model.state import DraftState
from dspine_export.runtime.executor import CachedExecutor


class TorchExecutor(CachedExecutor):
    """Runs `model.Drafter`; dtype and device are those of the tensors it was bound to."""

    name = "torch"

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.config, drafter.embed_tokens)
        self.drafter = drafter

    def project(self, target_hidden: Tensor, start_positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = start_positions[:, None] + torch.arange(target_hidden.shape[1], device=target_hidden.device)
        return self.drafter.model.context_keys_values(target_hidden, positions)

    @torch.no_grad()
    def draft(self, state: DraftState, anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor) -> DraftOutput:
        if not self.config.is_dspine:
            return self.drafter.draft_from(state, anchor_ids)  # drafts greedily at every temperature
        return self.drafter.draft_from(state, anchor_ids, temperature, uniforms=uniforms)
