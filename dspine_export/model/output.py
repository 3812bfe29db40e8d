"""What a draft pass returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftOutput:
    """One drafted block per sequence.

    Attributes:
        tokens: int64 [N, B-1], slot i holds the token drafted for position n + i.
        unrefined_tokens: int64 [N, B-1], top-1 of the unary logits.
        candidate_ids: int64 [N, B-1, K], descending unary logits; None for a DFlash drafter, as the next two.
        transition_scores: float32 [N, B-1, K, K], S[i, k (predecessor), j (successor)].
        q: float32 [N, B-1, K], the distribution each token was drawn from, over its candidates (one-hot where greedy).
        layer_outputs: [N, L, B, d] after each layer's injection; this and the rest only with return_intermediates.
        pre_injection: [N, B, d] last layer before its injection.
        hidden_states: [N, B, d] final-normed.
    """

    tokens: Tensor
    unrefined_tokens: Tensor
    candidate_ids: Tensor | None = None
    transition_scores: Tensor | None = None
    q: Tensor | None = None
    layer_outputs: Tensor | None = None
    pre_injection: Tensor | None = None
    hidden_states: Tensor | None = None
