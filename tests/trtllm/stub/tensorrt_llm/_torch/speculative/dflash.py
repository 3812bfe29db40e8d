"""Stub of the DFlash-lineage worker: context store, block inputs, draft forward, refinement, in the real order, on any device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PAGE = 4  # columns per page of the paged cache


@dataclass
class DFlashSpecMetadata:
    max_num_requests: int
    layers_to_capture: list[int]
    hidden_size: int
    max_num_tokens: int
    runtime_draft_len: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    request_ids: list[int] = field(default_factory=list)
    draft_tokens: Tensor | None = None

    def __post_init__(self) -> None:
        self.layers_to_capture = sorted(self.layers_to_capture)
        width = self.hidden_size * len(self.layers_to_capture)
        self.captured = torch.full((self.max_num_tokens, width), float("nan"), dtype=self.dtype, device=self.device)
        self.worker: DFlashWorker | None = None

    def prepare(self) -> None:
        if self.worker is not None:
            self.worker.forget_all_but(self.request_ids)

    def maybe_capture_hidden_states(self, layer_id: int, hidden_states: Tensor, residual: Tensor | None = None) -> None:
        if layer_id in self.layers_to_capture:
            at = self.layers_to_capture.index(layer_id) * self.hidden_size
            whole = hidden_states if residual is None else hidden_states + residual
            self.captured[: whole.shape[0], at : at + self.hidden_size] = whole

    def get_hidden_states(self, num_tokens: int) -> Tensor:
        return self.captured[:num_tokens]


class DFlashWorker:
    def __init__(self, spec_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False) -> None:
        self.spec_config, self.mapping = spec_config, mapping
        self.max_draft_len = spec_config.max_draft_len
        self.paged = spec_config.attention_backend == "TRTLLM"
        self.slots: dict[int, int] = {}
        self.free: list[int] = []
        self.lengths: Tensor | None = None
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None
        self.kv_cache: Tensor | None = None
        self.table: Tensor | None = None

    def set_draft_model(self, draft_model: Any) -> None:
        assert getattr(draft_model.model, "d2t", None) is None

    def forget_all_but(self, request_ids: list[int]) -> None:
        for request in [request for request in self.slots if request not in request_ids]:
            self.free.append(self.slots.pop(request))

    def slot(self, request: int, fresh: bool) -> int:
        assert self.lengths is not None
        if fresh and request in self.slots:
            self.free.append(self.slots.pop(request))
        if request not in self.slots:
            self.slots[request] = self.free.pop(0)
            self.lengths[self.slots[request]] = 0
        return self.slots[request]

    def _lazy_init_ctx_buffers(
        self, draft_model: Any, spec_metadata: Any, attn_metadata: Any, draft_kv_cache_manager: Any = None
    ) -> None:
        if self.lengths is not None:
            return
        if draft_model.dflash_attention_backend != self.spec_config.attention_backend:
            raise ValueError("the worker's and the draft model's attention backends must match")
        if draft_model.block_size < self._draft_block_width(draft_model):
            raise ValueError("max_draft_len exceeds the block the drafter was trained with")
        draft_model._build_fused_kv_buffers()
        layers, heads, size = draft_model._num_attn_layers, draft_model._num_kv_heads, draft_model._head_dim
        like = draft_model.fc.weight
        slots, columns = (
            spec_metadata.max_num_requests + 1,
            attn_metadata.max_seq_len + self._draft_block_width(draft_model),
        )
        columns = -(-columns // PAGE) * PAGE
        # What no request wrote must never matter; the real arena starts from zeros.
        if self.paged:
            pages = columns // PAGE
            self.kv_cache = like.new_zeros(layers, slots * pages, 2, heads, PAGE, size)
            order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(0))
            self.table = order.view(slots, pages).int().to(like.device)
        else:
            self.k_cache = like.new_zeros(slots, layers, columns, heads, size)
            self.v_cache = like.new_zeros(slots, layers, columns, heads, size)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=like.device)
        self.free = list(range(spec_metadata.max_num_requests))

    def write(self, keys: Tensor, values: Tensor, slots: Tensor, columns: Tensor) -> None:
        """keys, values [n, L, Hkv, D] to (slot, column) pairs [n]."""
        if self.kv_cache is None or self.table is None:
            assert self.k_cache is not None and self.v_cache is not None
            self.k_cache[slots, :, columns], self.v_cache[slots, :, columns] = keys, values
            return
        pages, offsets = self.table[slots, columns // PAGE].long(), columns % PAGE
        for layer in range(keys.shape[1]):
            self.kv_cache[layer, pages, 0, :, offsets] = keys[:, layer]
            self.kv_cache[layer, pages, 1, :, offsets] = values[:, layer]

    def _store_prefill_context(
        self, draft_model: Any, spec_metadata: Any, attn_metadata: Any, position_ids: Tensor, total_target_tokens: int
    ) -> None:
        captured = spec_metadata.get_hidden_states(total_target_tokens)[: attn_metadata.num_ctx_tokens]
        projected, start = draft_model.project_target_hidden(captured), 0
        assert self.lengths is not None
        for row in range(attn_metadata.num_contexts):
            count = int(attn_metadata._seq_lens[row])
            positions = position_ids[start : start + count]
            slot = self.slot(spec_metadata.request_ids[row], fresh=int(positions[0]) == 0)
            columns = self.lengths[slot] + torch.arange(count, device=positions.device)
            keys, values = draft_model.precompute_context_kv(projected[start : start + count], positions)
            self.write(keys, values, torch.full_like(columns, slot), columns)
            self.lengths[slot] += count
            start += count

    def prepare_1st_drafter_inputs(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        accepted_tokens: Tensor,
        num_accepted_tokens: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        total_target_tokens: int = 0,
    ) -> dict[str, Any]:
        contexts, width = attn_metadata.num_contexts, self._draft_block_width(draft_model)
        accepted, counts = accepted_tokens[contexts:].long(), num_accepted_tokens[contexts:].long()
        assert self.lengths is not None
        slots = torch.tensor(
            [self.slots[request] for request in spec_metadata.request_ids[contexts:]], device=accepted.device
        )
        block = torch.arange(self.max_draft_len + 1, device=accepted.device)
        captured = spec_metadata.get_hidden_states(total_target_tokens)[attn_metadata.num_ctx_tokens :]
        columns = self.lengths[slots, None] + block  # [G, K+1]
        keys, values = draft_model.precompute_context_kv(draft_model.project_target_hidden(captured), columns.flatten())
        kept = (block < counts[:, None]).flatten()
        for rows in (keys, values):
            rows.mul_(kept.view(-1, 1, 1, 1).to(rows.dtype))  # rejected rows are written as zeros beyond the length
        self.write(keys, values, slots.repeat_interleave(block.shape[0]), columns.flatten())
        self.lengths[slots] += counts
        anchors = accepted.gather(1, (counts - 1)[:, None]).squeeze(1)
        mask = torch.full((1,), draft_model.mask_token_id, device=accepted.device)
        embedded = draft_model.draft_model_full.model.embed_tokens(torch.cat((anchors, mask)))
        noise = embedded[-1].expand(anchors.shape[0], width, -1).clone()
        noise[:, 0] = embedded[:-1]
        return {
            "noise_embedding": noise,
            "query_positions": self.lengths[slots, None] + torch.arange(width, device=accepted.device),
            "num_ctx_per_req": self.lengths[slots],
            "ctx_k_cache": self.k_cache,
            "ctx_v_cache": self.v_cache,
            "ctx_cache_batch_idx": slots,
            "ctx_kv_cache": self.kv_cache,
            "ctx_page_table": self.table,
            "first_prev_tokens": anchors,
        }

    def sample_and_accept_draft_tokens(
        self, logits: Tensor, attn_metadata: Any, spec_metadata: Any
    ) -> tuple[Tensor, Tensor]:
        """Greedy verification: tokens [N, K+1] and how many of them count."""
        contexts, drafted = attn_metadata.num_contexts, spec_metadata.runtime_draft_len
        choice = logits.argmax(-1)
        tokens = choice.new_zeros(attn_metadata.num_seqs, drafted + 1)
        counts = torch.ones(attn_metadata.num_seqs, dtype=torch.long, device=logits.device)
        tokens[:contexts, 0] = choice[:contexts]
        if attn_metadata.num_seqs > contexts:
            block = choice[contexts:].view(-1, drafted + 1)
            equal = (block[:, :-1] == spec_metadata.draft_tokens.view(-1, drafted)).long()
            tokens[contexts:], counts[contexts:] = block, equal.cumprod(1).sum(1) + 1
        return tokens, counts

    def sample_draft_tokens(
        self, logits: Tensor, spec_metadata: Any, batch_size: int, *, num_contexts: int = 0
    ) -> Tensor:
        return logits.argmax(-1)

    def _draft_block_width(self, draft_model: Any) -> int:
        return self.max_draft_len + 1

    def _draft_slot_ids(self, draft_model: Any, num_gens: int, block_size: int, num_draft_tokens: int) -> Tensor:
        first = torch.arange(num_gens)[:, None] * block_size
        return (first + 1 + torch.arange(num_draft_tokens)).flatten()

    def _refine_block_logits(
        self, draft_model: Any, gen_logits: Tensor, inputs: dict[str, Any], spec_metadata: Any
    ) -> Tensor:
        return gen_logits

    def _forward_impl(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        logits: Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        resource_manager: Any = None,
    ) -> dict[str, Tensor]:
        contexts, drafted = attn_metadata.num_contexts, spec_metadata.runtime_draft_len
        gens, total = attn_metadata.num_seqs - contexts, input_ids.shape[0]
        self._lazy_init_ctx_buffers(draft_model, spec_metadata, attn_metadata)
        spec_metadata.worker = self
        tokens, counts = self.sample_and_accept_draft_tokens(logits, attn_metadata, spec_metadata)
        position_ids = position_ids.squeeze(0)
        if contexts:
            self._store_prefill_context(draft_model, spec_metadata, attn_metadata, position_ids, total)
        next_draft = tokens.new_zeros(attn_metadata.num_seqs, drafted)
        if gens:
            next_draft[contexts:] = self.draft(
                draft_model,
                self.prepare_1st_drafter_inputs(
                    input_ids,
                    position_ids,
                    hidden_states,
                    tokens,
                    counts,
                    attn_metadata,
                    spec_metadata,
                    draft_model,
                    total_target_tokens=total,
                ),
                attn_metadata,
                spec_metadata,
            )
        return {"new_tokens": tokens, "new_tokens_lens": counts, "next_draft_tokens": next_draft}

    def draft(self, draft_model: Any, inputs: dict[str, Any], attn_metadata: Any, spec_metadata: Any) -> Tensor:
        drafted, gens = spec_metadata.runtime_draft_len, inputs["num_ctx_per_req"].shape[0]
        out = draft_model.dflash_forward(
            **{name: value for name, value in inputs.items() if name != "first_prev_tokens"}
        )
        ids = self._draft_slot_ids(draft_model, gens, self._draft_block_width(draft_model), drafted).to(out.device)
        logits = draft_model.logits_processor(out[ids], draft_model.lm_head, attn_metadata, True)
        logits = self._refine_block_logits(draft_model, logits.reshape(gens, drafted, -1), inputs, spec_metadata)
        return self.sample_draft_tokens(
            logits, spec_metadata, attn_metadata.num_seqs, num_contexts=attn_metadata.num_contexts
        )
