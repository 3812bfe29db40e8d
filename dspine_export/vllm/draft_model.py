"""`DSpineDraftModel`: the drafter inside vLLM's Model Runner V2, behind the interface of its DFlash and DSpark drafters.

vLLM's speculator stores the context's keys and values (`precompute_and_store_context_kv`), runs `forward` over one flattened block of
1 anchor + T masks per request through vLLM's attention layers, and calls `sample_sequential`; all of it is recorded in one CUDA graph.
Backbone and context come from vLLM's DFlash classes; where `fused_support` finds nothing against it, `fused_backbone` runs their weights
on this package's kernels. What DSpine adds is in `block_injection`, `block_decoding` and `proposal`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model

from dspine_export.errors import UsageError
from dspine_export.vllm.block_decoding import BlockDecoder, MessageSpace
from dspine_export.vllm.block_injection import block_injection
from dspine_export.vllm.drafter_sizes import drafter_config
from dspine_export.vllm.fused_support import obstacle
from dspine_export.vllm.injection_weights import FoldedInjection
from dspine_export.vllm.proposal import Proposal
from dspine_export.vllm.target_head import TargetHead
from dspine_export.vllm.walk_hook import install_walk_hook
from dspine_export.vllm.weight_names import canonical, is_injection

if TYPE_CHECKING:
    from dspine_export.vllm.backbone_pass import BackbonePass
    from dspine_export.vllm.fused_backbone import FusedBackbone

_logger = logging.getLogger("vllm.dspine_export")
# Float32 logits of a whole batch would be the largest buffer of the process; blocks are decoded so many requests at a time.
REQUESTS_PER_PASS = 64


class DSpineBackbone(DFlashQwen3Model):  # type: ignore[misc]
    """The decoder layers with the injection after each but the last, whose states `sample_sequential` continues from."""

    def __init__(self, *, vllm_config: Any, start_layer_id: int = 0, prefix: str = "") -> None:
        drafter = vllm_config.speculative_config.draft_model_config.hf_config
        # The rotary tables end there, and the server may go further than the drafter was trained for.
        limit = max(drafter.max_position_embeddings, vllm_config.model_config.max_model_len)
        drafter.max_position_embeddings = limit
        super().__init__(vllm_config=vllm_config, start_layer_id=start_layer_id, prefix=prefix)
        self.drafter = drafter_config(self.config)
        self.injection = FoldedInjection(self.drafter)
        self.block = 1 + vllm_config.speculative_config.num_speculative_tokens
        self._sizes = (vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len)
        self._fused: FusedBackbone | None = None
        self._decided = False

    def __call__(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None = None) -> Tensor:
        """`forward`, compiled by vLLM, or the same on this package's kernels."""
        fused = self.fused() if input_embeds is None else None
        states = None if fused is None else fused.run(input_ids, positions, get_forward_context().attn_metadata)
        return super().__call__(input_ids, positions, input_embeds) if states is None else states

    def fused(self) -> FusedBackbone | None:
        """This package's kernels over this module's weights, decided at the first call, when weights and embedding are in place."""
        if not self._decided:
            self._decided = True
            reason = obstacle(self, get_tensor_model_parallel_world_size())
            if reason is None:
                from dspine_export.vllm.fused_backbone import FusedBackbone

                self._fused = FusedBackbone(self, *self._sizes)
            else:
                _logger.info("dspine: the drafter runs on vLLM's layers: %s", reason)
        return self._fused

    def combine(self, taps: Tensor) -> Tensor | None:
        """`FusedBackbone.combine`. It decides nothing: vLLM projects tapped states before all is in place that a decision looks at."""
        return None if self._fused is None else self._fused.combine(taps)

    @property
    def last_pass(self) -> BackbonePass | None:
        """The pass that made the states which the last call returned; None: vLLM's layers did."""
        return None if self._fused is None else self._fused.last

    def precompute_and_store_context_kv(
        self, context_states: Tensor, context_positions: Tensor, context_slot_mapping: Any = None
    ) -> None:
        """vLLM's, or the same with one launch behind the projection. No slots: only memory is measured."""
        ready = context_slot_mapping is not None and hasattr(self, "_num_attn_layers")
        fused = self.fused() if ready else None
        if fused is None or not fused.store(context_states, context_positions, context_slot_mapping):
            super().precompute_and_store_context_kv(context_states, context_positions, context_slot_mapping)

    def forward(self, input_ids: Tensor, positions: Tensor, input_embeds: Tensor | None = None) -> Tensor:
        """States of the last layer before its injection, [rows, d], for rows of flattened blocks."""
        hidden = self.embed_input_ids(input_ids) if input_embeds is None else input_embeds
        anchors = input_ids[:: self.block].long()
        normed = self.layers[0].input_layernorm(hidden)
        for index, layer in enumerate(self.layers):
            attended = layer.self_attn(positions=positions, hidden_states=normed)
            normed, residual = layer.post_attention_layernorm(attended, hidden)
            hidden = layer.mlp(normed) + residual
            if index + 1 < len(self.layers):
                hidden, normed = self._inject(index, hidden, anchors)
        return hidden

    def _inject(self, index: int, hidden: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        weights, following = self.injection, self.layers[index + 1].input_layernorm
        return block_injection(
            hidden, anchors, weights.readout_weight(index), weights.gates, weights.bias, weights.token_table,
            weights.write_weight(index), following.weight, following.variance_epsilon, self.block,
        )  # fmt: skip


class DSpineDraftModel(DFlashQwen3ForCausalLM):  # type: ignore[misc]
    """A DSpine drafter. Embedding and head are the target's; the injection is replicated on every tensor-parallel rank."""

    model_cls = DSpineBackbone

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._decoder: BlockDecoder | None = None
        self._proposal: Proposal | None = None

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """vLLM's, or the same on this package's kernels, once those run the layers. [R, A*d] -> [R, d]"""
        fc = getattr(self.model, "fc", None)
        whole = fc is not None and hidden_states.ndim == 2 and hidden_states.shape[1] == fc.input_size
        states = self.model.combine(hidden_states) if whole else None
        return super().combine_hidden_states(hidden_states) if states is None else states

    @torch.inference_mode()
    def sample_sequential(self, speculator: Any, num_reqs: int, head_hidden: Tensor) -> bool:
        """Decodes ``num_reqs`` blocks into ``speculator.draft_tokens``; called by vLLM in place of its Markov sampling.

        Args:
            head_hidden: [rows, d] as `forward` returned it, padding rows behind the blocks.

        Returns:
            True: the step is done.
        """
        decoder, proposal = self._prepare(speculator)
        own = self.model.last_pass
        block, ids = decoder.block, speculator.input_buffers.input_ids
        for start in range(0, num_reqs, REQUESTS_PER_PASS):
            stop = min(start + REQUESTS_PER_PASS, num_reqs)
            rows = slice(start * block, stop * block)
            draws = proposal.draws(start, stop)
            anchors, sums = (ids[rows][::block].long(), None) if own is None else (own.anchor_ids[start:stop], own.sums)
            candidate_ids, q = decoder.decode(head_hidden[rows], anchors, draws, sums)
            proposal.publish(start, stop, draws, candidate_ids, q)
        return True

    def _prepare(self, speculator: Any) -> tuple[BlockDecoder, Proposal]:
        """Made at the first call, an eager one, when the target's head is in place."""
        if self._decoder is None or self._proposal is None:
            backbone = self.model
            _check_layout(speculator, backbone.block)
            _leave_out_the_schedule(speculator, backbone)
            count = backbone.drafter.transfer.top_k
            norm = backbone.norm
            head = TargetHead.of(self.lm_head, norm.weight.dtype, count)
            tables = MessageSpace.of(backbone.injection, norm.weight, head) if norm.weight.is_cuda else None
            self._decoder = BlockDecoder(
                backbone.injection, norm.weight, norm.variance_epsilon, head, backbone.block, count, tables
            )
            self._proposal = Proposal(speculator, count)
        return self._decoder, self._proposal

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """From a SpecForge checkpoint or a directory of ``build --target vllm`` (see `weight_names`).

        Raises:
            CheckpointError: the injection's tensors are not all there.
        """
        injection: dict[str, Tensor] = {}

        def backbone() -> Iterator[tuple[str, Tensor]]:
            for stored, value in weights:
                name = canonical(stored)
                if is_injection(name):
                    injection[name] = value
                else:
                    yield name, self._in_layer_order(value) if name == "fc.weight" else value

        super().load_weights(backbone())
        self.model.injection.load(injection)

    def _in_layer_order(self, fc: Tensor) -> Tensor:
        """fc's columns for taps in ascending layer order, in which vLLM collects them. [d, A*d] -> the same"""
        taps = self.model.drafter.target_layer_ids
        order = sorted(range(len(taps)), key=taps.__getitem__)
        return fc.unflatten(1, (len(taps), -1))[:, order].flatten(1)


def _leave_out_the_schedule(speculator: Any, backbone: DSpineBackbone) -> None:
    """Every graph of vLLM's begins with the schedule of its own attention; ours has none. The warm-up before a capture tells whose runs."""
    update = getattr(speculator, "_update_draft_decode_metadata", None)
    if update is None:
        return

    def only_where_read(*args: Any, **kwargs: Any) -> None:
        if backbone.last_pass is None:
            update(*args, **kwargs)

    speculator._update_draft_decode_metadata = only_where_read


def _check_layout(speculator: Any, block: int) -> None:
    if speculator.num_query_per_req != block:
        raise UsageError(
            "vLLM lays the drafter's blocks out as for DSpark: the anchor predicts",
            where="sample_from_anchor",
            got=f"{speculator.num_query_per_req} rows a request",
            expected=f"{block}: the anchor and {block - 1} masks",
            fix='set "sample_from_anchor": false in the drafter\'s config.json (build --target vllm does)',
        )


install_walk_hook()

EntryClass: type[nn.Module] = DSpineDraftModel
