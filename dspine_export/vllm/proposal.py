"""The drafter's side of probabilistic drafting: per-request draws, and the proposal that vLLM's rejection sampler reads.

With ``draft_sample_method: greedy`` (vLLM's default) drafts are the greedy walk and the sampler takes them as certain, which is exact at
any temperature. With ``probabilistic`` the sampler reads logits ``[request slot, step, V]`` and divides them by the request's
temperature: what is stored is T log q on the K candidates and -inf elsewhere, in float32, so that it arrives at the very q walked with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspine_export.runtime.request_uniforms import request_uniforms
from dspine_export.vllm.block_decoding import Draws


class Proposal:
    """Buffers of one speculator, at fixed addresses because CUDA graphs record them.

    Args:
        speculator: vLLM's; its ``draft_logits`` are replaced, when it has them, by a float32 buffer that starts as -inf.
        count: K.
    """

    def __init__(self, speculator: Any, count: int) -> None:
        self.speculator = speculator
        self.slots, requests = speculator.num_speculative_steps, speculator.max_num_reqs
        device = speculator.draft_tokens.device
        self._cold, self._unused = (
            torch.zeros(requests, device=device),
            torch.zeros(requests, self.slots, device=device),
        )
        self._logits: Tensor | None = None
        if speculator.draft_logits is not None:
            vocabulary = speculator.draft_logits.shape[-1]
            speculator.draft_logits = None  # freed before its successor is made
            # One row more than requests: what padding rows of a graph write must land somewhere.
            shape = (requests + 1, self.slots, vocabulary)
            self._logits = torch.full(shape, float("-inf"), device=device)
            # A Python number would be copied from the host at every write, which a graph cannot record.
            self._lowest = torch.full((), float("-inf"), device=device)
            self._written = torch.zeros(requests + 1, self.slots, count, dtype=torch.int64, device=device)
            speculator.draft_logits = self._logits[:requests]

    def draws(self, start: int, stop: int) -> Draws:
        """For the batch's rows ``start .. stop``: greedy unless the speculator drafts probabilistically."""
        speculator = self.speculator
        tokens = speculator.draft_tokens[start:stop]
        if self._logits is None:
            return Draws(self._cold[start:stop], self._unused[start:stop], tokens)
        requests = self._requests(start, stop).clamp_min(0)
        positions = speculator.sample_pos[start * self.slots : stop * self.slots].view(-1, self.slots)
        uniforms = request_uniforms(speculator.seeds[requests], positions)
        return Draws(speculator.temperature[requests], uniforms, tokens)

    def publish(self, start: int, stop: int, draws: Draws, candidate_ids: Tensor, q: Tensor) -> None:
        """Makes q [N, T, K] over candidate_ids int64 [N, T, K] the proposal of the batch's rows ``start .. stop``."""
        if self._logits is None:
            return
        requests = self._requests(start, stop)
        requests = torch.where(requests >= 0, requests, self._logits.shape[0] - 1)
        request, slot = requests[:, None, None], torch.arange(self.slots, device=q.device)[:, None]
        self._logits.index_put_((request, slot, self._written[requests]), self._lowest)
        heat = draws.temperature[:, None, None]
        # Greedy rows are verified against the target's argmax; their logits are not read, but must not become NaN.
        self._logits[request, slot, candidate_ids] = torch.where(heat > 0, q.log() * heat, 0.0)
        self._written[requests] = candidate_ids

    def _requests(self, start: int, stop: int) -> Tensor:
        """Request slots of the batch's rows, -1 for padding. int64 [N]"""
        return self.speculator.sample_idx_mapping[start * self.slots : stop * self.slots : self.slots]
