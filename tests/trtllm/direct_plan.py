"""The same plan run directly beside the hooks: on the worker's cache, read here by plain indexing, without the adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dspine_export.trtllm.draft_model import DSpineForCausalLM
from dspine_export.trtllm.plan_block import PlanSession

Draft = Callable[..., Tensor]
ATTEMPTS = 20


class DirectRuns:
    """Stands in for the worker's `draft`: drafts through the hooks and demands what the plan itself returns, bit for bit.

    Args:
        draft: the worker's own.
        session: runs the plan (`runtime.plan_runner`).
        columns: cache columns that the plan's profile takes.
    """

    def __init__(self, draft: Draft, model: DSpineForCausalLM, session: PlanSession, columns: int) -> None:
        self.draft, self.model, self.session, self.columns, self.compared = draft, model, session, columns, 0

    def __call__(self, draft_model: Any, inputs: dict[str, Any], attention: Any, metadata: Any) -> Tensor:
        feeds = self.feeds(inputs)
        for _ in range(ATTEMPTS):
            before = self.session.run(feeds)
            self.model.model.embed_tokens(torch.cat((inputs["first_prev_tokens"], self._mask(inputs))))
            tokens = self.draft(draft_model, inputs, attention, metadata)
            scores, candidates, q = self.model.executor._last  # type: ignore[union-attr]
            # TensorRT-RTX compiles kernels for these shapes in the background and changes over between any two runs.
            if same(before, self.session.run(feeds)):
                break
        else:
            raise AssertionError(f"the plan alone does not repeat itself in {ATTEMPTS} runs")
        hooks = {"transition_scores": scores, "candidate_ids": candidates, "q": q, "tokens": tokens}
        for name, got in hooks.items():
            assert torch.equal(got, before[name].to(got.dtype)), name
        self.compared += tokens.shape[0]
        return tokens

    def feeds(self, inputs: dict[str, Any]) -> dict[str, Tensor]:
        """The plan's inputs, cache columns beyond each length zero."""
        lengths, anchors = inputs["num_ctx_per_req"].long(), inputs["first_prev_tokens"].long()
        caches = [self._gather(inputs, side) for side in (0, 1)]  # [G, L, Hkv, C, D]
        committed = torch.arange(caches[0].shape[3], device=lengths.device) < lengths[:, None]
        keys, values = (cache * committed[:, None, None, :, None] for cache in caches)
        greedy = torch.zeros(len(anchors), device=lengths.device)
        uniforms = torch.zeros(len(anchors), self.model.block_size - 1, device=lengths.device)
        weights = {"embed_tokens": self.model.model.embed_tokens.weight, "lm_head": self.model.lm_head.weight}
        state = {"anchor_ids": anchors, "context_lengths": lengths, "keys": keys, "values": values}
        return {**state, "temperature": greedy, "uniforms": uniforms, **weights}

    def _gather(self, inputs: dict[str, Any], side: int) -> Tensor:
        rows = []
        for slot in inputs["ctx_cache_batch_idx"].tolist():
            if inputs["ctx_kv_cache"] is None:
                cache = inputs[("ctx_k_cache", "ctx_v_cache")[side]]
                row = cache[slot].transpose(1, 2)  # [L, C, Hkv, D]
            else:
                pages = inputs["ctx_page_table"][slot].tolist()
                row = torch.cat([inputs["ctx_kv_cache"][:, page, side] for page in pages], dim=2)  # [L, Hkv, page, D]
            rows.append(row[:, :, : self.columns])
        return torch.stack(rows)

    def _mask(self, inputs: dict[str, Any]) -> Tensor:
        return inputs["first_prev_tokens"].new_tensor([self.model.mask_token_id])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())
