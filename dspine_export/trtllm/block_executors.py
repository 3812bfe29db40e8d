"""What computes a block behind the draft-model hooks, and the torch model as one; `kernel_block` and `plan_block` are the others.

All split the work the way TensorRT-LLM calls it: context rows, then the block (`draft`), then its refinement (`refine`). Symbols:
G sequences, B block, T <= B-1 drafted slots asked for, V vocabulary, A taps.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.model.drafter import Drafter
from dspine_export.model.drafter_model import BlockStates
from dspine_export.model.transition import select_candidates, walk
from dspine_export.trtllm.chain_logits import chain_logits
from dspine_export.trtllm.worker_cache import WorkerContext

Last = TypeVar("Last")


class BlockExecutor(Protocol):
    """One block at a time; `refine` belongs to the `draft` before it. ``own_logits``: the target's head is not needed."""

    config: DrafterConfig
    own_logits: bool

    def draft(self, anchor_ids: Tensor, context: WorkerContext, lengths: Tensor) -> Tensor:
        """Final-normed states [G, B, d] (anything of that shape with ``own_logits``). anchor_ids, lengths int64 [G]."""

    def refine(self, base_logits: Tensor) -> Tensor:
        """Logits of the refined chain, float32 [G, T, V], from the target head's logits [G, T, V] of slots 1 .. T."""


class TorchBlock:
    """The torch model, which reads the whole context cache. Injection per layer happens in `draft`, the transition cache in `refine`.

    Where the kernels cannot run, and the reference for them; no host synchronisation on a GPU.
    """

    own_logits = False

    def __init__(self, drafter: Drafter) -> None:
        self.config, self.drafter = drafter.config, drafter
        self._last: tuple[BlockStates, Tensor] | None = None

    def draft(self, anchor_ids: Tensor, context: WorkerContext, lengths: Tensor) -> Tensor:
        keys, values = context.read()
        states = self.drafter.model.block_states(anchor_ids, keys, values, lengths, self.drafter.embed_tokens)
        self._last = (states, anchor_ids)
        return states.hidden

    def refine(self, base_logits: Tensor) -> Tensor:
        (states, anchors), transfer = last_block(self._last), self.config.transfer
        assert transfer is not None
        rows = slice(0, base_logits.shape[1] + 1)  # the anchor's and those asked for
        feature = None if states.pre_feature is None else states.pre_feature[:, rows]
        cut = BlockStates(states.hidden[:, rows], states.pre_injection[:, rows], feature, [])
        logits = base_logits[..., : self.config.vocab_size].float()  # a padded head has rows that are no tokens
        candidates = select_candidates(logits, transfer.top_k, settle_ties=not base_logits.is_cuda)
        scores = self.drafter.model.transition_scores(cut, anchors, candidates, self.drafter.lm_head)
        _, q = walk(scores, candidates, scores.new_zeros(scores.shape[0]), scores.new_zeros(scores.shape[:2]))
        return chain_logits(scores, candidates, q.argmax(dim=-1), base_logits.shape[-1])


def last_block(last: Last | None) -> Last:
    """What `draft` left for `refine`.

    Raises:
        UsageError: there was no `draft`.
    """
    if last is None:
        raise UsageError(
            "apply_markov_chain_logits was called without a block", fix="use a signature-checked TensorRT-LLM version"
        )
    return last
