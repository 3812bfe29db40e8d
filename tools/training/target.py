"""The frozen target as plain torch: one full pass that also returns the tapped layers, and one decode step over a static cache.

A Llama or Qwen3 decoder small enough to read here; written out because training needs the tapped hidden states of every position and
generation wants a fixed-shape decode step that a CUDA graph can replay. ``tests/tools`` compares it with transformers.

Symbols: N sequences, T positions, d hidden size, A taps, V vocabulary rows, S cache columns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a Llama or Qwen3 target, as its ``config.json`` gives them."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    eos_token_id: int


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves; ``cos`` and ``sin`` broadcast against ``x``'s last dimension."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """fp32 (cos, sin) of shape ``positions.shape + (head_dim,)``."""
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * theta ** (-steps / head_dim)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Target:
    """A frozen Llama or Qwen3 (one with query and key norms) on one device in one dtype."""

    def __init__(self, weights: dict[str, Tensor], shape: TargetShape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.weights = {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights.items()}
        self.embed = self.weights["model.embed_tokens.weight"]  # [V, d]
        self.head = self.weights.get("lm_head.weight", self.embed)  # [V, d]
        self.qkv, self.gate_up = [], []
        for index in range(shape.num_layers):
            prefix = f"model.layers.{index}."
            attention = (self.weights.pop(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv")
            self.qkv.append(torch.cat(tuple(attention)))
            mlp = (self.weights.pop(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up"))
            self.gate_up.append(torch.cat(tuple(mlp)))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name]
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.rms_norm_eps)

    def _project(self, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [.., H, D], k and v [.., Hkv, D] of ``x`` [.., d], rotated."""
        s = self.shape
        normed = self._norm(x, f"model.layers.{index}.input_layernorm.weight")
        fused = F.linear(normed, self.qkv[index]).unflatten(-1, (s.num_heads + 2 * s.num_kv_heads, s.head_dim))
        q, k, v = fused.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=-2)
        if f"model.layers.{index}.self_attn.q_norm.weight" in self.weights:
            q = self._norm(q, f"model.layers.{index}.self_attn.q_norm.weight")
            k = self._norm(k, f"model.layers.{index}.self_attn.k_norm.weight")
        cos, sin = cos[..., None, :].to(x.dtype), sin[..., None, :].to(x.dtype)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _finish(self, index: int, x: Tensor, attended: Tensor) -> Tensor:
        prefix = f"model.layers.{index}."
        x = x + F.linear(attended, self.weights[f"{prefix}self_attn.o_proj.weight"])
        normed = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        gate, up = F.linear(normed, self.gate_up[index]).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.weights[f"{prefix}mlp.down_proj.weight"])

    @torch.no_grad()
    def forward(
        self, ids: Tensor, taps: tuple[int, ...] = (), cache: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Full causal pass over right-padded ``ids`` [N, T].

        Returns (tapped outputs [N, T, A*d] in the order of ``taps``, final normed hidden [N, T, d]). With ``cache`` the keys and
        values of every layer are written to its first T columns; padding rows hold values that a later decode step overwrites.
        """
        positions = torch.arange(ids.shape[1], device=self.device)
        cos, sin = rope_tables(positions, self.shape.head_dim, self.shape.rope_theta)
        x, tapped = self.embed[ids], {}
        for index in range(self.shape.num_layers):
            q, k, v = (t.transpose(1, 2) for t in self._project(index, x, cos, sin))
            if cache is not None:
                cache[0][index, :, :, : ids.shape[1]] = k
                cache[1][index, :, :, : ids.shape[1]] = v
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self._finish(index, x, attended.transpose(1, 2).flatten(-2))
            if index in taps:
                tapped[index] = x
        hidden = torch.cat([tapped[a] for a in taps], dim=-1) if taps else x[..., :0]
        return hidden, self._norm(x, "model.norm.weight")

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor], columns: int) -> Tensor:
        """One step: fp32 logits [N, V] after ``tokens`` [N] at ``positions`` [N]; attends to cache columns <= position."""
        _, final = self.decode_block(tokens[:, None], positions, cache, columns)
        return F.linear(final[:, 0], self.head).float()

    @torch.no_grad()
    def decode_block(
        self, tokens: Tensor, starts: Tensor, cache: tuple[Tensor, Tensor], columns: int, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """B tokens per sequence at positions ``starts[n] + i``, after what the cache holds before ``starts[n]``.

        The query heads of a group are laid out as query rows, so grouped attention needs no copy of the keys.

        Args:
            tokens: int64 [N, B].
            starts: int64 [N].
            columns: cache columns to look at, above every position.

        Returns:
            (tapped outputs [N, B, A*d], final normed hidden [N, B, d]) as `forward`.
        """
        s, (count, size) = self.shape, tokens.shape
        rows = torch.arange(count, device=self.device)[:, None]
        positions = starts[:, None] + torch.arange(size, device=self.device)
        cos, sin = rope_tables(positions, s.head_dim, s.rope_theta)
        visible = torch.arange(columns, device=self.device) <= positions[..., None]  # [N, B, columns]
        bias = torch.zeros(visible.shape, device=self.device, dtype=self.dtype).masked_fill_(~visible, float("-inf"))
        group = s.num_heads // s.num_kv_heads
        bias = bias[:, None].repeat(1, 1, group, 1).expand(-1, s.num_kv_heads, -1, -1)
        x, tapped = self.embed[tokens], {}
        for index in range(s.num_layers):
            q, k, v = self._project(index, x, cos, sin)  # [N, B, heads, D]
            cache[0][index][rows, :, positions] = k
            cache[1][index][rows, :, positions] = v
            keys, values = cache[0][index][:, :, :columns], cache[1][index][:, :, :columns]
            q = q.unflatten(2, (s.num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [N, Hkv, group * B, D]
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias).unflatten(2, (group, size))
            x = self._finish(index, x, attended.permute(0, 3, 1, 2, 4).flatten(2))
            if index in taps:
                tapped[index] = x
        hidden = torch.cat([tapped[a] for a in taps], dim=-1) if taps else x[..., :0]
        return hidden, self._norm(x, "model.norm.weight")

    def new_cache(self, batch: int, columns: int) -> tuple[Tensor, Tensor]:
        """Zeroed keys and values, each [layers, N, Hkv, S, D]."""
        s = self.shape
        size = (s.num_layers, batch, s.num_kv_heads, columns, s.head_dim)
        return tuple(torch.zeros(size, device=self.device, dtype=self.dtype) for _ in range(2))  # type: ignore[return-value]


def read_shape(path: Path) -> TargetShape:
    """Sizes from the ``config.json`` of a Hugging Face Llama or Qwen3 directory."""
    raw = json.loads((path / "config.json").read_text())
    heads = raw["num_attention_heads"]
    theta = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
    return TargetShape(
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=float(theta),
        eos_token_id=raw["eos_token_id"],
    )


def load_target(path: Path, device: torch.device, dtype: torch.dtype) -> Target:
    """The target in ``path`` (one ``model.safetensors``), frozen."""
    return Target(load_file(path / "model.safetensors"), read_shape(path), device, dtype)
