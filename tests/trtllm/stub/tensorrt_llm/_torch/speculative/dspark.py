"""Stub of the worker of a standalone DSpark drafter."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .dflash import DFlashWorker


class DSparkWorker(DFlashWorker):
    def _draft_slot_ids(self, draft_model: Any, num_gens: int, block_size: int, num_draft_tokens: int) -> Tensor:
        assert not getattr(draft_model, "_dspark_shift_label", False), "DSpine labels are not shifted"
        return super()._draft_slot_ids(draft_model, num_gens, block_size, num_draft_tokens)

    def _refine_block_logits(
        self, draft_model: Any, gen_logits: Tensor, inputs: dict[str, Any], spec_metadata: Any
    ) -> Tensor:
        if not getattr(draft_model, "has_markov_head", False):
            return gen_logits
        if gen_logits.shape[-1] != draft_model.markov_w2.shape[0]:
            raise NotImplementedError("logits of another width than the drafter's vocabulary")
        return draft_model.apply_markov_chain_logits(
            gen_logits, inputs["first_prev_tokens"], argmax_fn=lambda logits: logits.argmax(-1), vocab_slice=None
        )
