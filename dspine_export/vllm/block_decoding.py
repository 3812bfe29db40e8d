"""From the last layer's states to drafted tokens: last injection, candidates, transition cache, walk. Fixed shapes, nothing read back.

The backbone stops before its last injection, because that is the state the transition cache starts from. Symbols: N sequences, B block
(1 anchor + T slots), d hidden, m message, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dspine_export.model.injection import inject, predicted_feature
from dspine_export.model.transition import predecessor_ids, walk
from dspine_export.vllm.fused_messages import fused_messages, skinny_write
from dspine_export.vllm.injection_weights import FoldedInjection
from dspine_export.vllm.target_head import TargetHead


@dataclass(frozen=True)
class Draws:
    """How the walk picks: float32 temperature [N] (0 is greedy) and uniforms [N, T]; tokens int64 [N, T] receives the draft."""

    temperature: Tensor
    uniforms: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class MessageSpace:
    """What the kernels read beside the checkpoint's weights.

    Attributes:
        read: [r + m, d], the last readout and the last write transposed.
        scores, gram: [rows of the head, m] and [m, m], see `dspine_kernels.transition.fold_scores`; none where the head is sharded.
    """

    read: Tensor
    scores: Tensor
    gram: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, injection: FoldedInjection, norm_weight: Tensor, head: TargetHead) -> MessageSpace:
        """Folds the head once, a gigabyte of reading."""
        from dspine_kernels.transition import fold_scores

        write = injection.write_weight(-1)
        read = torch.cat((injection.readout_weight(-1), write.T)).contiguous()
        rows = head.weight if head.shards == 1 else head.weight[:0]
        return cls(read, *fold_scores(rows, norm_weight, write))


@dataclass(frozen=True)
class BlockDecoder:
    """The weights this stage reads.

    Attributes:
        norm_weight: gain [d] of the final norm. count: K.
        tables: for the fused path, None on a CPU.
    """

    injection: FoldedInjection
    norm_weight: Tensor
    eps: float
    head: TargetHead
    block: int
    count: int
    tables: MessageSpace | None = None

    def decode(
        self, pre_injection: Tensor, anchor_ids: Tensor, draws: Draws, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Drafts one block per sequence into `draws.tokens`.

        Args:
            pre_injection: [N*B, d], the last layer's states before its injection.
            anchor_ids: int64 [N].
            sums: float32 [T, N*B], parts of the sums of squares of few rows, where the kernel that made them left some.

        Returns:
            candidate_ids int64 [N, T, K] and q float32 [N, T, K], the very rows walked (one-hot where greedy).
        """
        if pre_injection.is_cuda:
            return self._fused(pre_injection, anchor_ids, draws, sums)
        return self._eager(pre_injection, anchor_ids, draws)

    def _eager(self, pre_injection: Tensor, anchor_ids: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        weights, pre = self.injection, pre_injection.view(-1, self.block, pre_injection.shape[-1])
        receiver, predecessor, message = weights.gates.chunk(3)
        readout, write = weights.readout_weight(-1), weights.write_weight(-1)
        feature = predicted_feature(pre, readout)
        anchors = F.embedding(anchor_ids, weights.token_table)
        injected = inject(pre, feature, anchors, message, receiver, predecessor, weights.bias, write)
        hidden = F.rms_norm(injected, self.norm_weight.shape, self.norm_weight, self.eps)
        candidate_ids = self.head.candidates(hidden[:, 1:], self.count)
        gates = F.linear(feature[:, 1:], receiver) + weights.bias
        scores = self._score(pre[:, 1:], gates, anchor_ids, candidate_ids)
        tokens, q = walk(scores, candidate_ids, draws.temperature, draws.uniforms)
        draws.tokens.copy_(tokens)
        return candidate_ids, q

    def _score(self, pre: Tensor, receiver_gate: Tensor, anchor_ids: Tensor, candidate_ids: Tensor) -> Tensor:
        """The transition cache by the eager model's function. pre [N, T, d], receiver_gate [N, T, m] -> float32 [N, T, K, K]"""
        rows = F.embedding(predecessor_ids(anchor_ids, candidate_ids), self.injection.token_table)
        message, gate = rows.chunk(2, dim=-1)
        write = self.injection.write_weight(-1)
        return self.head.score_pairs(
            pre, receiver_gate, message, gate, candidate_ids, write, self.norm_weight, self.eps
        )

    def _fused(
        self, pre_injection: Tensor, anchor_ids: Tensor, draws: Draws, sums: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        weights, write = self.injection, self.injection.write_weight(-1)
        rows, m, device = pre_injection.shape[0], write.shape[1], pre_injection.device
        receiver = torch.empty(rows, m, device=device)
        z, read = fused_messages(
            pre_injection, self._tables().read, weights.gates, weights.bias, weights.token_table, anchor_ids, self.block, receiver
        )  # fmt: skip
        pull = read[:, weights.rank :]  # Wr^T of the states
        squares, candidate_ids = self._fused_candidates(pre_injection, z, write, sums)
        if self.head.shards > 1:  # rows of the head live on other ranks
            pre, gates = (x.view(-1, self.block, x.shape[-1])[:, 1:] for x in (pre_injection, receiver))
            scores = self._score(pre, gates.to(pre.dtype), anchor_ids, candidate_ids)
            tokens, q = walk(scores, candidate_ids, draws.temperature, draws.uniforms)
            draws.tokens.copy_(tokens)
            return candidate_ids, q
        return candidate_ids, self._fused_walk(pre_injection, squares, pull, receiver, anchor_ids, candidate_ids, draws)

    def _fused_candidates(
        self, pre_injection: Tensor, z: Tensor, write: Tensor, sums: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The last injection and candidates. Parts of the sums of squares of pre_injection float32 [T, N*B], ids int64 [N, T, K]"""
        from dspine_kernels.rows import write_and_norm

        rows, gain, device = pre_injection.shape[0], self.norm_weight, pre_injection.device
        if sums is not None and sums.shape[1] == rows:
            scaled, squares = skinny_write(pre_injection, z, write, sums, gain, self.block)
            return sums, self.head.fused_candidates(scaled, self.block, self.count, squares, self.eps)
        injected, normed = torch.empty_like(pre_injection), torch.empty_like(pre_injection)
        squares, update = torch.empty(rows, device=device), torch.mm(z, write.T)
        write_and_norm(pre_injection, update, gain, self.eps, self.block, injected, normed, squares)
        return squares.view(1, -1), self.head.fused_candidates(normed, self.block, self.count)

    def _fused_walk(
        self, pre_injection: Tensor, squares: Tensor, pull: Tensor, receiver: Tensor, anchor_ids: Tensor,
        candidate_ids: Tensor, draws: Draws,
    ) -> Tensor:  # fmt: skip
        from dspine_kernels.transition import TransitionScratch, transition_scores, walk_choices

        tables, (batch, slots, count) = self._tables(), candidate_ids.shape
        scratch = TransitionScratch.of(batch * slots, count, pull.shape[1], pre_injection)
        scores = torch.empty(batch, slots, count, count, device=pre_injection.device)
        q = torch.empty_like(scores[:, :, 0])
        transition_scores(
            pre_injection, squares, pull, receiver, anchor_ids, candidate_ids, self.injection.token_table,
            tables.scores, tables.gram, self.norm_weight, self.head.weight, self.eps, draws.temperature, draws.uniforms,
            scores, scratch, self.block,
        )  # fmt: skip
        walk_choices(scratch.choices, scratch.soft, candidate_ids, draws.temperature, draws.tokens, q)
        return q

    def _tables(self) -> MessageSpace:
        if self.tables is None:
            raise RuntimeError("fused decoding needs the tables of MessageSpace.of")
        return self.tables
