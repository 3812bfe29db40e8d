"""One Qwen3 decoder layer of the DFlash family: block rows attend to cached context rows and to their own block."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.model.norm import RMSNorm
from dspine_export.model.rope import rotate


class BlockAttention(nn.Module):
    """Grouped-query attention whose keys and values are [context ; block] and whose queries are block rows only."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        d, eps = config.hidden_size, config.rms_norm_eps
        self.q_proj = nn.Linear(d, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(d, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(d, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, d, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim, eps), RMSNorm(self.head_dim, eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values of context or block rows. x [N, T, d] -> 2 x [N, Hkv, T, D]"""
        keys = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))).transpose(1, 2)
        values = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return rotate(keys, cos, sin), values

    def attend(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, B, d], keys/values [N, Hkv, C+B, D], mask bool [N, 1, B, C+B] (True = visible) -> [N, B, d]"""
        queries = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))).transpose(1, 2)
        queries = rotate(queries, cos, sin)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=self.heads != self.kv_heads
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def context(self, context: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of normed context rows [N, T, d]: they skip the layer norm and are shared by all layers."""
        return self.self_attn.keys_values(context, cos, sin)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, B, d]; context keys and values [N, Hkv, C, D]; mask bool [N, 1, B, C+B] -> [N, B, d]"""
        normed = self.input_layernorm(x)
        block_keys, block_values = self.self_attn.keys_values(normed, cos, sin)
        keys = torch.cat((context[0], block_keys), dim=2)
        values = torch.cat((context[1], block_values), dim=2)
        x = x + self.self_attn.attend(normed, keys, values, mask, cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))
