"""The two entry points of a drafter as modules of plain tensors, and their input/output contract.

context: target hidden states of newly committed tokens -> keys and values the runtime appends to its cache.
draft: anchor, cache and lengths -> drafted tokens, with everything a verifier needs.

Two entries, because context keys and values are a pure function of (tapped state, position): each committed token is projected once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.model.drafter_model import DrafterModel
from dspine_export.model.transition import select_candidates, unary_logits

BATCH, CONTEXT, TOKENS = "batch", "context", "tokens"
ENTRIES = ("context", "draft")


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. dtype "T" is the compute dtype; string dimensions are dynamic."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class EntryContract:
    """Name, inputs and outputs of one entry point."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def context_contract(config: DrafterConfig) -> EntryContract:
    """target_hidden [batch, tokens, A*d], start_positions [batch] -> new_keys, new_values [batch, L, Hkv, tokens, D]"""
    width = len(config.target_layer_ids) * config.hidden_size
    cache = (BATCH, config.num_layers, config.num_kv_heads, TOKENS, config.head_dim)
    return EntryContract(
        "context",
        (TensorSpec("target_hidden", "T", (BATCH, TOKENS, width)), TensorSpec("start_positions", "int64", (BATCH,))),
        (TensorSpec("new_keys", "T", cache), TensorSpec("new_values", "T", cache)),
    )


def draft_contract(config: DrafterConfig) -> EntryContract:
    """Inputs and outputs of the draft entry; a DFlash drafter has neither sampling inputs nor transition outputs."""
    cache = (BATCH, config.num_layers, config.num_kv_heads, CONTEXT, config.head_dim)
    table = (config.vocab_size, config.hidden_size)
    slots = config.block_size - 1
    inputs = [
        TensorSpec("anchor_ids", "int64", (BATCH,)),
        TensorSpec("context_lengths", "int64", (BATCH,)),
        TensorSpec("keys", "T", cache),
        TensorSpec("values", "T", cache),
    ]
    tail = [TensorSpec("embed_tokens", "T", table), TensorSpec("lm_head", "T", table)]
    tokens = TensorSpec("tokens", "int64", (BATCH, slots))
    unrefined = TensorSpec("unrefined_tokens", "int64", (BATCH, slots))
    if config.transfer is None:
        return EntryContract("draft", (*inputs, *tail), (tokens, unrefined))
    k = config.transfer.top_k
    inputs += [TensorSpec("temperature", "float32", (BATCH,)), TensorSpec("uniforms", "float32", (BATCH, slots))]
    scores = (
        TensorSpec("candidate_ids", "int64", (BATCH, slots, k)),
        TensorSpec("transition_scores", "float32", (BATCH, slots, k, k)),
        TensorSpec("q", "float32", (BATCH, slots, k)),
    )
    return EntryContract("draft", (*inputs, *tail), (tokens, *scores, unrefined))


class ContextEntry(nn.Module):
    """`context_contract` as a module."""

    def __init__(self, model: DrafterModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, target_hidden: Tensor, start_positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = start_positions.unsqueeze(-1) + torch.arange(target_hidden.shape[1], device=target_hidden.device)
        return self.model.context_keys_values(target_hidden, positions)


class DraftEntry(nn.Module):
    """`draft_contract` of a DSpine drafter, followed by the features training aligns (dropped by the first pass)."""

    def __init__(self, model: DrafterModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        anchor_ids: Tensor,
        context_lengths: Tensor,
        keys: Tensor,
        values: Tensor,
        temperature: Tensor,
        uniforms: Tensor,
        embed_tokens: Tensor,
        lm_head: Tensor,
    ) -> tuple[Tensor, ...]:
        states = self.model.block_states(anchor_ids, keys, values, context_lengths, embed_tokens)
        tokens, candidates, scores, q = self.model.decode(states, anchor_ids, lm_head, temperature, uniforms)
        return tokens, candidates, scores, q, candidates[..., 0], *self.model.aligned_features(states)


class UnaryDraftEntry(nn.Module):
    """`draft_contract` of a DFlash drafter: the unary logits decide alone."""

    def __init__(self, model: DrafterModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        anchor_ids: Tensor,
        context_lengths: Tensor,
        keys: Tensor,
        values: Tensor,
        embed_tokens: Tensor,
        lm_head: Tensor,
    ) -> tuple[Tensor, ...]:
        states = self.model.block_states(anchor_ids, keys, values, context_lengths, embed_tokens)
        tokens = select_candidates(unary_logits(states.hidden[:, 1:], lm_head), 1)[..., 0]
        return tokens, tokens.clone()
