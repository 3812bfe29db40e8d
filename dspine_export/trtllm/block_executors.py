"""What computes a block behind the draft-model hooks: the torch model, or a TensorRT plan through `runtime.plan_runner`.

Both split the work the way TensorRT-LLM calls it: context rows, then the block (`draft`), then its refinement (`refine`). Symbols:
G sequences, B block, T <= B-1 drafted slots asked for, V vocabulary, A taps.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.model.drafter import Drafter
from dspine_export.model.drafter_model import BlockStates
from dspine_export.model.transition import select_candidates
from dspine_export.trtllm.chain_logits import chain_logits

Last = TypeVar("Last")


class BlockExecutor(Protocol):
    """One block at a time; `refine` belongs to the `draft` before it. ``own_logits``: the target's head is not needed."""

    config: DrafterConfig
    own_logits: bool

    def draft(self, anchor_ids: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        """Final-normed states [G, B, d]. anchor_ids, lengths int64 [G]; keys, values [G, L, Hkv, C, D]."""

    def refine(self, base_logits: Tensor) -> Tensor:
        """Logits of the refined chain, float32 [G, T, V], from the target head's logits [G, T, V] of slots 1 .. T."""


class TorchBlock:
    """The torch model. Injection per layer happens in `draft`, the transition cache in `refine`; no host synchronisation in either."""

    own_logits = False

    def __init__(self, drafter: Drafter) -> None:
        self.config, self.drafter = drafter.config, drafter
        self._last: tuple[BlockStates, Tensor] | None = None

    def draft(self, anchor_ids: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        states = self.drafter.model.block_states(anchor_ids, keys, values, lengths, self.drafter.embed_tokens)
        self._last = (states, anchor_ids)
        return states.hidden

    def refine(self, base_logits: Tensor) -> Tensor:
        (states, anchors), transfer = _expect(self._last), self.config.transfer
        assert transfer is not None
        rows = slice(0, base_logits.shape[1] + 1)  # the anchor's and those asked for
        feature = None if states.pre_feature is None else states.pre_feature[:, rows]
        cut = BlockStates(states.hidden[:, rows], states.pre_injection[:, rows], feature, [])
        candidates = select_candidates(base_logits.float(), transfer.top_k, settle_ties=not base_logits.is_cuda)
        scores = self.drafter.model.transition_scores(cut, anchors, candidates, self.drafter.lm_head)
        return chain_logits(scores, candidates, base_logits.shape[-1])


class PlanSession(Protocol):
    """A draft plan that runs on the current stream; see `runtime.plan_runner`."""

    def run(self, feeds: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Outputs by name; inputs by name, contiguous."""


class PlanBlock:
    """A draft plan. It contains head, candidates and walk, so TensorRT-LLM's own head is not asked.

    Args:
        columns: most cache columns the plan's profile takes; the worker's cache is cut there, which is right as long as no sequence
            is longer (the generated config.yaml sees to it). None for a session without limit.
    """

    own_logits = True

    def __init__(
        self,
        config: DrafterConfig,
        session: PlanSession,
        embed_tokens: Tensor,
        lm_head: Tensor,
        columns: int | None = None,
    ) -> None:
        if not config.is_dspine:
            raise UsageError(
                "The plan executor serves DSpine drafters", got=config.architecture, fix="use the torch executor"
            )
        self.config, self.session, self._columns = config, session, columns
        self._bound = {"embed_tokens": embed_tokens, "lm_head": lm_head}
        self._hidden_size = config.hidden_size
        self._last: tuple[Tensor, Tensor] | None = None

    def draft(self, anchor_ids: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        batch, drafted = anchor_ids.shape[0], self.config.block_size - 1
        greedy = torch.zeros(batch, dtype=torch.float32, device=keys.device)
        outputs = self.session.run(
            {
                "anchor_ids": anchor_ids,
                "context_lengths": lengths,
                "keys": keys[:, :, :, : self._columns].contiguous(),
                "values": values[:, :, :, : self._columns].contiguous(),
                "temperature": greedy,
                "uniforms": greedy[:, None].expand(-1, drafted).contiguous(),
                **self._bound,
            }
        )
        self._last = (outputs["transition_scores"], outputs["candidate_ids"])
        return keys.new_zeros(1).expand(batch, self.config.block_size, self._hidden_size)

    def refine(self, base_logits: Tensor) -> Tensor:
        scores, candidates = _expect(self._last)
        slots = slice(0, base_logits.shape[1])
        return chain_logits(scores[:, slots].float(), candidates[:, slots].long(), base_logits.shape[-1])


def _expect(last: Last | None) -> Last:
    if last is None:
        raise UsageError(
            "apply_markov_chain_logits was called without a block", fix="use a signature-checked TensorRT-LLM version"
        )
    return last
