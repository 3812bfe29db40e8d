"""The drafter network: context projection and one parallel draft pass, as pure functions of tensors.

Nothing here keeps state between calls; `drafter.Drafter` adds the cache and the user-facing checks. Names of submodules are the
checkpoint's tensor names. Symbols: N batch, T context rows, B block, C cache capacity, L layers, A taps, d hidden, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.model.injection import AdjacentInjection
from dspine_export.model.layer import DecoderLayer
from dspine_export.model.mask import block_mask
from dspine_export.model.norm import RMSNorm
from dspine_export.model.rope import rotary_tables
from dspine_export.model.transition import predecessor_ids, score_pairs, select_candidates, unary_logits, walk


@dataclass
class BlockStates:
    """What one pass through the layers leaves behind.

    Attributes:
        hidden: final-normed states [N, B, d].
        pre_injection: last layer before its injection [N, B, d].
        pre_feature: phi_L(pre_injection) [N, B, r], None for DFlash.
        layer_outputs: after each layer's injection, L x [N, B, d].
    """

    hidden: Tensor
    pre_injection: Tensor
    pre_feature: Tensor | None
    layer_outputs: list[Tensor]


class DrafterModel(nn.Module):
    """Weights of one drafter; embedding and language-model head stay with the target and are passed in."""

    transfer_codes: Tensor | None

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = RMSNorm(d, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.injection = AdjacentInjection(config) if config.transfer is not None else None
        codes = None if config.transfer is None else torch.empty(config.vocab_size, config.transfer.rank)
        self.register_buffer("transfer_codes", codes)

    def context_keys_values(self, target_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of committed tokens, a pure function of tapped states and position: computed once per token.

        Args:
            target_hidden: [N, T, A*d] outputs of the tapped target layers, concatenated in tap order.
            positions: int64 [N, T] absolute positions.

        Returns:
            keys, values [N, L, Hkv, T, D].
        """
        return self.keys_values(self.context_features(target_hidden), positions)

    def context_features(self, target_hidden: Tensor) -> Tensor:
        """c_t: tapped states projected and normed, shared by all layers. [..., A*d] -> [..., d]"""
        return self.hidden_norm(self.fc(target_hidden))

    def keys_values(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, L, Hkv, T, D] of context features [N, T, d] at positions int64 [N, T]."""
        cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta, context.dtype)
        pairs = [layer.context(context, cos, sin) for layer in self._decoder_layers()]
        return torch.stack([k for k, _ in pairs], dim=1), torch.stack([v for _, v in pairs], dim=1)

    def block_inputs(self, anchor_ids: Tensor, embed_tokens: Tensor) -> Tensor:
        """Embeddings of [anchor, MASK x (B-1)]. [N] -> [N, B, d]"""
        slots = torch.arange(self.config.block_size, device=anchor_ids.device)
        ids = torch.where(slots == 0, anchor_ids.unsqueeze(-1), self.config.mask_token_id)
        return F.embedding(ids, embed_tokens)

    def block_states(
        self, anchor_ids: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, embed_tokens: Tensor
    ) -> BlockStates:
        """All layers over one block per sequence. anchor_ids, lengths int64 [N]; keys, values [N, L, Hkv, C, D]"""
        config = self.config
        positions = lengths.unsqueeze(-1) + torch.arange(config.block_size, device=lengths.device)
        x = self.block_inputs(anchor_ids, embed_tokens)
        cos, sin = rotary_tables(positions, config.head_dim, config.rope_theta, x.dtype)
        masks = {
            window: block_mask(lengths, keys.shape[3], config.block_size, config.is_causal, window)
            for window in {config.attention_window(index) for index in range(config.num_layers)}
        }
        anchor_feature = self._anchor_feature(anchor_ids)
        pre_injection, feature, outputs = x, None, []
        for index, layer in enumerate(self._decoder_layers()):
            mask = masks[config.attention_window(index)]
            pre_injection = layer(x, (keys[:, index], values[:, index]), mask, cos, sin)
            x = pre_injection
            if self.injection is not None and anchor_feature is not None:
                feature = self.injection.predicted_feature(index, x)
                x = self.injection(index, x, feature, anchor_feature)
            outputs.append(x)
        return BlockStates(self.norm(x), pre_injection, feature, outputs)

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def _anchor_feature(self, anchor_ids: Tensor) -> Tensor | None:
        if self.injection is None or self.transfer_codes is None:
            return None
        return self.injection.known_feature(F.embedding(anchor_ids, self.transfer_codes))

    def aligned_features(self, states: BlockStates) -> list[Tensor]:
        """phi_l of every layer's output after its injection, L x [N, B, r]: what training aligns with the true tokens' codes."""
        if self.injection is None:
            return []
        return [self.injection.predicted_feature(index, out) for index, out in enumerate(states.layer_outputs)]

    def transition_scores(
        self, states: BlockStates, anchor_ids: Tensor, candidate_ids: Tensor, lm_head: Tensor
    ) -> Tensor:
        """The transition cache S, float32 [N, B-1, K, K], for candidates int64 [N, B-1, K]."""
        injection, codes, feature = self.injection, self.transfer_codes, states.pre_feature
        assert injection is not None and codes is not None and feature is not None
        known = injection.known_feature(F.embedding(predecessor_ids(anchor_ids, candidate_ids), codes))  # [N, T, K, r]
        return score_pairs(
            states.pre_injection[:, 1:],
            injection.receiver_gate(feature[:, 1:]) + injection.bias,
            injection.message(known),
            injection.predecessor_gate(known),
            candidate_ids,
            injection.write_weight(-1),
            self.norm.weight,
            lm_head,
            self.config.rms_norm_eps,
        )

    def decode(
        self, states: BlockStates, anchor_ids: Tensor, lm_head: Tensor, temperature: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Candidates, scores and walk of a DSpine block.

        temperature float32 [N], uniforms float32 [N, B-1] -> tokens [N, B-1], candidate_ids [N, B-1, K],
        transition_scores [N, B-1, K, K], q [N, B-1, K].
        """
        assert self.config.transfer is not None
        logits = unary_logits(states.hidden[:, 1:], lm_head)
        candidate_ids = select_candidates(logits, self.config.transfer.top_k)
        scores = self.transition_scores(states, anchor_ids, candidate_ids, lm_head)
        tokens, q = walk(scores, candidate_ids, temperature, uniforms)
        return tokens, candidate_ids, scores, q
