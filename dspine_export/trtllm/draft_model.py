"""`DSpineForCausalLM`: the draft-model protocol that TensorRT-LLM's DFlash-lineage worker drives.

The worker owns context cache, slots, acceptance and sampling; per step it calls, in this order, `project_target_hidden`,
`precompute_context_kv`, the embedding, `dflash_forward`, the logits processor and `apply_markov_chain_logits`. Signatures and who calls
them: `snapshots`. Leading-underscore attributes are names the worker reads. Symbols: n tokens, G sequences, A taps, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.model.drafter_model import DrafterModel
from dspine_export.model.loading import COMPUTE_DTYPES
from dspine_export.trtllm.anchor_embedding import AnchorEmbedding
from dspine_export.trtllm.block_executors import BlockExecutor
from dspine_export.trtllm.worker_cache import open_context, to_worker_rows

Loader = Callable[[Tensor, Tensor], tuple[DrafterModel, BlockExecutor]]
"""From the target's embed_tokens and lm_head [V, d] to the network (context rows) and the executor (blocks)."""


class DSpineForCausalLM(nn.Module):
    """A drafter inside TensorRT-LLM. Holds no weights until the target's are known: construction may happen on the meta device.

    Args:
        config: the drafter's configuration.
        draft_config: TensorRT-LLM's ``ModelConfig`` of the drafter.
        attention_backend: ``VANILLA`` or ``TRTLLM``; says only which cache the worker keeps.
        loader: makes network and executor once the target's matrices are there.
    """

    _dspark_shift_label = False  # slot i predicts its own position, as in DFlash

    def __init__(self, config: DrafterConfig, draft_config: Any, attention_backend: str, loader: Loader) -> None:
        super().__init__()
        self.drafter_config, self._loader = config, loader
        self.model_config, self.config = draft_config, draft_config.pretrained_config
        self.dflash_attention_backend = attention_backend
        self.mask_token_id, self.block_size = config.mask_token_id, config.block_size
        self.target_layer_ids = list(config.target_layer_ids)
        self._num_attn_layers, self._num_heads = config.num_layers, config.num_heads
        self._num_kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._uses_worker_attention_backend = False  # attention is ours, whatever keeps the cache
        # The worker captures taps in ascending layer order; the checkpoint's fc was trained with them in its own order.
        order = sorted(range(len(self.target_layer_ids)), key=self.target_layer_ids.__getitem__)
        self._tap_order = None if order == sorted(order) else [order.index(tap) for tap in range(len(order))]
        self.model = SimpleNamespace(embed_tokens=None, mask_token_id=config.mask_token_id)
        self.draft_model_full = SimpleNamespace(model=self.model, lm_head=None)
        self.lm_head: Any = None
        self.executor: BlockExecutor | None = None

    @property
    def fc(self) -> nn.Linear:
        """The context projection; the worker takes the cache's dtype from it."""
        return self._network.fc

    @property
    def hidden_norm(self) -> nn.Module:
        return self._network.hidden_norm

    @property
    def has_markov_head(self) -> bool:
        """Whether `apply_markov_chain_logits` has something to say; causal DFlash drafters keep the unary logits."""
        return self.drafter_config.is_dspine

    @property
    def markov_w2(self) -> Tensor:
        """The worker compares its logits' width with these rows: the head [V, d]."""
        weight: Tensor = self.lm_head.weight
        return weight

    @property
    def logits_processor(self) -> Any:
        """TensorRT-LLM's own, or a stand-in that costs nothing when the executor brings its logits."""
        given = self._modules.get("logits_processor") or self.__dict__.get("_logits_processor")
        return self._placeholder_logits if self.executor is not None and self.executor.own_logits else given

    @logits_processor.setter
    def logits_processor(self, processor: Any) -> None:
        self.__dict__["_logits_processor"] = processor

    def load_weights(self, weights: Any, weight_mapper: Any = None, **kwargs: Any) -> None:
        """Nothing yet: the validated checkpoint of the bundle is read when the target's matrices are known."""

    def load_weights_from_target_model(self, target_model: Any) -> None:
        """Shares the target's embedding and head and loads the drafter onto their device.

        Raises:
            UsageError: a quantised or vocabulary-sharded target. CheckpointError: the target does not fit the drafter.
        """
        embedding, self.lm_head = target_model.model.embed_tokens, target_model.lm_head
        self.draft_model_full.lm_head = self.lm_head
        self.model.embed_tokens = AnchorEmbedding(embedding)
        rows = self.drafter_config.vocab_size
        matrices = [
            _matrix(module, name, rows) for module, name in ((embedding, "embed_tokens"), (self.lm_head, "lm_head"))
        ]
        self.drafter_network, self.executor = self._loader(*matrices)

    def _build_fused_kv_buffers(self) -> None:
        """The worker's signal that weights are there; keys and values need no fused copy here."""
        _ = self._network

    @torch.no_grad()
    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        """Context features [n, d] of captured states [n, A*d]."""
        if self._tap_order is not None:
            hidden_states = hidden_states.unflatten(-1, (len(self._tap_order), -1))[..., self._tap_order, :].flatten(-2)
        return self._network.context_features(hidden_states.to(self.fc.weight.dtype))

    @torch.no_grad()
    def precompute_context_kv(self, projected_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, L, Hkv, D] of context features [n, d] at positions [n]."""
        keys, values = self._network.keys_values(projected_hidden[None], positions[None].long())
        return to_worker_rows(keys, values)

    @torch.no_grad()
    def dflash_forward(
        self,
        noise_embedding: Tensor,
        query_positions: Tensor,
        num_ctx_per_req: Tensor,
        ctx_k_cache: Tensor | None,
        ctx_v_cache: Tensor | None,
        ctx_cache_batch_idx: Tensor,
        ctx_kv_cache: Tensor | Sequence[Tensor] | None = None,
        ctx_page_table: Tensor | None = None,
    ) -> Tensor:
        """One block per sequence with the injection after every layer. Fixed shapes, the cache is only read.

        Args:
            noise_embedding: [G, B, d]; only its shape is used, the anchors' ids come from the embedding (`anchor_embedding`).
            query_positions: [G, B], the block's positions; they follow from num_ctx_per_req.
            num_ctx_per_req: [G], committed tokens per sequence.
            ctx_k_cache, ctx_v_cache, ctx_cache_batch_idx, ctx_kv_cache, ctx_page_table: see `worker_cache`.

        Returns:
            [G * B, d], final-normed.
        """
        batch, width = noise_embedding.shape[:2]
        if width != self.block_size:
            raise UsageError(
                "TensorRT-LLM asks for another block width than the drafter was trained for",
                where="speculative_config",
                got=f"max_draft_len {width - 1}",
                expected=f"max_draft_len {self.block_size - 1}",
            )
        anchors = self.model.embed_tokens.take_anchors(batch)
        rows = ctx_cache_batch_idx[:batch]
        context = open_context(ctx_k_cache, ctx_v_cache, rows, ctx_kv_cache, ctx_page_table)
        hidden = self._ready.draft(anchors, context, num_ctx_per_req[:batch].long())
        return hidden.reshape(batch * width, -1)

    @torch.no_grad()
    def apply_markov_chain_logits(
        self, base_logits: Tensor, first_prev_tokens: Tensor, argmax_fn: Any = None, vocab_slice: slice | None = None
    ) -> Tensor:
        """The transition cache where a DSpark drafter has its Markov chain: logits of the refined chain, float32 [G, T, V].

        Args:
            base_logits: [G, T, V], the target head on the block's states at slots 1 .. T.
            first_prev_tokens: [G], the anchors; already known from the embedding.
            argmax_fn, vocab_slice: for vocabulary-sharded heads, which are refused.
        """
        if vocab_slice is not None:
            raise _sharded("logits", base_logits.shape[-1], self.drafter_config.vocab_size)
        return self._ready.refine(base_logits)

    def _placeholder_logits(self, hidden: Tensor, *_: Any) -> Tensor:
        width = self.markov_w2.shape[0]
        return hidden.new_zeros(1, dtype=torch.float32).expand(hidden.shape[0], width)

    @property
    def _network(self) -> DrafterModel:
        network = self._modules.get("drafter_network")
        if not isinstance(network, DrafterModel):
            raise AttributeError("the drafter has no weights before load_weights_from_target_model")
        return network

    @property
    def _ready(self) -> BlockExecutor:
        if self.executor is None:
            raise AttributeError("the drafter has no weights before load_weights_from_target_model")
        return self.executor


def _matrix(module: Any, name: str, rows: int) -> Tensor:
    """The module's weight [V, d], padding rows beyond the drafter's vocabulary left out."""
    weight: Tensor = module.weight
    if weight.dtype not in COMPUTE_DTYPES:
        raise UsageError(
            "The drafter needs the target's plain matrices",
            where=name,
            got=str(weight.dtype),
            expected="bfloat16 or float32",
            fix="serve the target in bfloat16, embedding and head not quantised",
        )
    if weight.shape[0] < rows:
        raise _sharded(name, weight.shape[0], rows)
    return weight.detach()[:rows]


def _sharded(where: str, got: int, rows: int) -> UsageError:
    return UsageError(
        "A vocabulary sharded over GPUs is not supported",
        where=where,
        got=f"{got} rows",
        expected=f"{rows}",
        fix="serve with tensor_parallel_size 1 (or attention data parallelism, which keeps the head whole)",
    )
