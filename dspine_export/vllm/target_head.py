"""The target's language-model head as the drafter reads it: this rank's rows, candidates over all ranks, scores summed over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspine_export.errors import UsageError
from dspine_export.model.transition import score_pairs, select_candidates, unary_logits
from dspine_export.vllm.fused_messages import few, skinny_logits
from dspine_export.vllm.narrow_head import NarrowHead


@dataclass(frozen=True)
class TargetHead:
    """Rows ``first .. first + len(weight)`` of the head.

    Attributes:
        weight: [rows, d], padding rows left out.
        first: vocabulary id of the first row.
        shards: ranks that share the vocabulary.
        gather, reduce: concatenate along the last dimension over ranks, and sum over ranks; unused on one rank.
        narrow: a float8 copy for shortlists, on one rank of a GPU, if any.
    """

    weight: Tensor
    first: int
    shards: int
    gather: Callable[[Tensor], Tensor]
    reduce: Callable[[Tensor], Tensor]
    narrow: NarrowHead | None = None

    @classmethod
    def of(cls, module: Any, dtype: torch.dtype, count: int) -> TargetHead:
        """From vLLM's (vocabulary-parallel) head module, for K = `count` candidates.

        Raises:
            UsageError: the head is quantised: the drafter scores candidates against its rows.
        """
        from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

        weight, shard = getattr(module, "weight", None), module.shard_indices
        if weight is None or weight.dtype != dtype or weight.ndim != 2:
            raise UsageError(
                "The drafter needs the target's plain language-model head",
                where="lm_head",
                got="no weight" if weight is None else f"{weight.dtype} {list(weight.shape)}",
                expected=f"{dtype} [vocabulary, hidden]",
                fix="serve a target whose lm_head is not quantised, in the model's own dtype",
            )
        own = weight.detach()[: shard.org_vocab_end_index - shard.org_vocab_start_index]
        return cls(
            own,
            shard.org_vocab_start_index,
            module.tp_size,
            tensor_model_parallel_all_gather,
            tensor_model_parallel_all_reduce,
            NarrowHead.of(own, count) if module.tp_size == 1 else None,
        )

    def candidates(self, hidden: Tensor, count: int) -> Tensor:
        """Ids of the K largest logits, descending, ties to the lower id. hidden [N, T, d] -> int64 [N, T, K]"""
        logits = unary_logits(hidden, self.weight)
        ids = select_candidates(logits, count, settle_ties=not logits.is_cuda)
        return self._merge(logits, ids)

    def fused_candidates(
        self, normed: Tensor, block: int, count: int, squares: Tensor | None = None, eps: float = 0.0
    ) -> Tensor:
        """The same from flattened blocks on CUDA: normed [N*B, d] -> int64 [N, B-1, K]. With squares: few rows of `skinny_write`."""
        from dspine_kernels.topk import select_candidates as select_from_keys
        from dspine_kernels.topk import top_candidates
        from dspine_kernels.topk.kernel import workspace_keys

        batch, slots, vocabulary, device = normed.shape[0] // block, block - 1, self.weight.shape[0], normed.device
        ids = torch.empty(batch * slots, count, dtype=torch.int64, device=device)
        if self.narrow is not None:
            return self.narrow.candidates(normed, self.weight, block, ids).view(batch, slots, count)
        if squares is not None or few(normed):
            logits, tile_keys, width = skinny_logits(normed, self.weight, block, squares, eps)
            select_from_keys(logits, ids, tile_keys, width, block)
        else:
            if normed.dtype == torch.float32:
                logits = torch.mm(normed, self.weight.T)
            else:
                logits = torch.mm(normed, self.weight.T, out_dtype=torch.float32)
            keys = torch.empty(workspace_keys(batch * slots, vocabulary), dtype=torch.int64, device=device)
            top_candidates(logits, ids, keys, block)
        return self._merge(logits.view(batch, block, vocabulary)[:, 1:], ids.view(batch, slots, count))

    def _merge(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The best K of every rank's best K; ranks hold ascending ids, so a stable sort settles ties as one rank would."""
        if self.shards == 1:
            return ids
        # One collective of one type: vocabulary ids are exact in float32.
        best = torch.cat((logits.gather(-1, ids), (ids + self.first).float()), dim=-1)
        values, every = self.gather(best).unflatten(-1, (self.shards, 2, -1)).unbind(-2)  # 2 x [N, T, shards, K]
        order = values.flatten(-2).sort(dim=-1, descending=True, stable=True).indices
        return every.flatten(-2).gather(-1, order[..., : ids.shape[-1]]).long()

    def score_pairs(
        self,
        pre_injection: Tensor,
        receiver_gate: Tensor,
        message: Tensor,
        predecessor_gate: Tensor,
        candidate_ids: Tensor,
        write_weight: Tensor,
        norm_weight: Tensor,
        eps: float,
    ) -> Tensor:
        """`model.transition.score_pairs` over all ranks: each scores the candidates it has rows of, zeros elsewhere."""
        local = candidate_ids - self.first
        own = (local >= 0) & (local < self.weight.shape[0])
        scores = score_pairs(
            pre_injection, receiver_gate, message, predecessor_gate, torch.where(own, local, 0),
            write_weight, norm_weight, self.weight, eps,
        )  # fmt: skip
        return scores if self.shards == 1 else self.reduce(torch.where(own.unsqueeze(-2), scores, 0.0))
