"""A TensorRT plan behind the draft-model hooks, through `runtime.plan_runner`, on the current stream."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.trtllm.block_executors import last_block
from dspine_export.trtllm.chain_logits import chain_logits
from dspine_export.trtllm.worker_cache import WorkerContext

_PAGE = 256  # the worker rounds its cache up, a page at most


class PlanSession(Protocol):
    """A draft plan that runs on the current stream; see `runtime.plan_runner`."""

    def run(self, feeds: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Outputs by name; inputs by name, contiguous."""


class PlanBlock:
    """A draft plan. It contains head, candidates and walk, so TensorRT-LLM's own head is not asked.

    Args:
        columns: most cache columns the plan's profile takes; the worker's cache is cut there, which is right as long as no sequence
            is longer (the generated config.yaml sees to it; a much larger cache is refused). None for a session without limit.
        copies: copy committed columns only, by a kernel; else the whole cache is read, by torch.
    """

    own_logits = True

    def __init__(
        self,
        config: DrafterConfig,
        session: PlanSession,
        embed_tokens: Tensor,
        lm_head: Tensor,
        columns: int | None = None,
        *,
        copies: bool = False,
    ) -> None:
        if not config.is_dspine:
            raise UsageError(
                "The plan executor serves DSpine drafters", got=config.architecture, fix="use the torch executor"
            )
        self.config, self.session, self._columns, self._copies = config, session, columns, copies
        self._bound = {"embed_tokens": embed_tokens, "lm_head": lm_head}
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def draft(self, anchor_ids: Tensor, context: WorkerContext, lengths: Tensor) -> Tensor:
        batch, drafted = anchor_ids.shape[0], self.config.block_size - 1
        keys, values = self._cache(context, lengths)
        greedy = torch.zeros(batch, dtype=torch.float32, device=keys.device)
        outputs = self.session.run(
            {
                "anchor_ids": anchor_ids,
                "context_lengths": lengths,
                "keys": keys,
                "values": values,
                "temperature": greedy,
                "uniforms": greedy[:, None].expand(-1, drafted).contiguous(),
                **self._bound,
            }
        )
        self._last = (outputs["transition_scores"], outputs["candidate_ids"], outputs["q"])
        return keys.new_zeros(1).expand(batch, self.config.block_size, self.config.hidden_size)

    def refine(self, base_logits: Tensor) -> Tensor:
        slots = slice(0, base_logits.shape[1])
        scores, candidates, q = (output[:, slots] for output in last_block(self._last))
        return chain_logits(scores.float(), candidates.long(), q.argmax(dim=-1), base_logits.shape[-1])

    def _cache(self, context: WorkerContext, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [G, L, Hkv, C, D], contiguous."""
        room = self.config.block_size + _PAGE
        if self._columns is not None and context.columns > self._columns + room:
            raise UsageError(
                "TensorRT-LLM serves longer sequences than the plan was built for",
                where="max_seq_len in config.yaml",
                got=f"a context cache of {context.columns} columns",
                expected=f"max_seq_len {self._columns} (a cache of at most {self._columns + room})",
                fix="lower max_seq_len, or build --resume OUT with a larger --max-seq-len",
            )
        if not self._copies:
            keys, values = context.read()
            return keys[:, :, :, : self._columns].contiguous(), values[:, :, :, : self._columns].contiguous()
        batch, heads, columns, dim = context.shape
        shape = (batch, len(context.keys), heads, min(columns, self._columns or columns), dim)
        keys, values = (context.keys[0].new_zeros(shape) for _ in range(2))  # masked columns must be finite
        for layer in range(shape[1]):
            context.copy(layer, lengths, keys[:, layer], values[:, layer])
        return keys, values
