"""The heads of DSpine's ancestors, trained in the acceptance lab only: they condition a slot's choice on the token before it.

    markov      DSpark, vanilla:  logits_i(c) = <h_i, W_c> + <A_prev, B_c>                     over the whole vocabulary
    selector    DFlash2:          score_i(c)  = <h_i, W_c> + <A_prev * H h_i, B_c>             over the K best c of the unary logits

prev is the token at the slot before: the true one while training, the chosen one while drafting. B starts at zero, so training begins
from the plain backbone. Both tables are [V, rank].

Symbols: V vocabulary, d hidden, K candidates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KINDS = ("", "markov", "selector")


class _Rows(torch.autograd.Function):
    """``table[ids]`` whose gradient is an index_add: unlike the embedding's own, it never waits for the host under graph capture."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.like = table
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        flat = gradients[0].flatten(0, -2).to(ctx.like.dtype)
        return torch.zeros_like(ctx.like).index_add_(0, ids.flatten(), flat), None


class PairHead(nn.Module):
    """The tables of one head; ``kind`` is "markov" or "selector"."""

    def __init__(self, kind: str, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.kind = kind
        self.previous = nn.Parameter(torch.empty(vocab_size, rank))
        self.following = nn.Parameter(torch.empty(vocab_size, rank))
        self.gate = nn.Linear(hidden_size, rank, bias=False) if kind == "selector" else None

    @torch.no_grad()
    def initialise(self) -> None:
        """Normal rows of length about 1, a small gate, zero outputs."""
        rank = self.previous.shape[1]
        nn.init.normal_(self.previous, std=rank**-0.5)
        nn.init.zeros_(self.following)
        if self.gate is not None:
            nn.init.normal_(self.gate.weight, std=self.gate.weight.shape[1] ** -0.5)

    def query(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """What is multiplied with the rows of ``following``: [.., d] states and [..] token ids -> [.., rank]."""
        rows: Tensor = _Rows.apply(self.previous, previous)
        return rows if self.gate is None else rows * self.gate(hidden)

    def following_rows(self, ids: Tensor) -> Tensor:
        """Rows of ``following`` for ``ids`` [..] -> [.., rank]."""
        rows: Tensor = _Rows.apply(self.following, ids)
        return rows
