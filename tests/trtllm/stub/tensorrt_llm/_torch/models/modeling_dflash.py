"""Stub of the DFlash draft model: signatures only."""

from __future__ import annotations

from typing import Any


class DFlashForCausalLM:
    def project_target_hidden(self, hidden_states: Any) -> Any:
        raise NotImplementedError

    def precompute_context_kv(self, projected_hidden: Any, positions: Any) -> Any:
        raise NotImplementedError

    def _build_fused_kv_buffers(self) -> None:
        raise NotImplementedError

    def load_weights(self, weights: Any, weight_mapper: Any = None, **kwargs: Any) -> None:
        raise NotImplementedError

    def load_weights_from_target_model(self, target_model: Any) -> None:
        raise NotImplementedError

    def dflash_forward(
        self,
        noise_embedding: Any,
        query_positions: Any,
        num_ctx_per_req: Any,
        ctx_k_cache: Any,
        ctx_v_cache: Any,
        ctx_cache_batch_idx: Any,
        ctx_kv_cache: Any = None,
        ctx_page_table: Any = None,
    ) -> Any:
        raise NotImplementedError
