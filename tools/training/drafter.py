"""The drafter as a trainable module: many blocks of one sequence in one pass, the rest as in the specification model.

Parameter names are those of the checkpoint. The maths is ``dspine_export.model``'s, laid out for training: M blocks of B rows per
sequence stand side by side as M*B query rows, every layer's keys are [context rows, block rows], and one mask says who sees whom.
A test holds the two against each other layer by layer.

Symbols: N sequences, T context rows, M blocks, B rows of a block, d hidden, r transfer rank, m message size, A taps, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.training.heads import PairHead
from tools.training.target import rope_tables, rotate


@dataclass(frozen=True)
class DrafterShape:
    """Sizes of a drafter and its switches; ``inject`` and ``causal`` decide what is trained, not only what is run."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    rank: int
    message_size: int
    top_k: int
    rms_norm_eps: float
    rope_theta: float
    causal: bool = True
    inject: bool = True
    head: str = ""  # "markov" or "selector": an ancestor's head in place of the transfer space (acceptance lab only)
    head_rank: int = 0


class DraftPass(NamedTuple):
    """What one pass over the blocks leaves behind; rows as [N, M, B, ...]."""

    hidden: Tensor  # [N, M, B, d] after the last injection and the final norm
    pre_injection: Tensor  # [N, M, B, d] the last layer before its injection
    layer_outputs: list[Tensor]  # L times [N, M, B, d] after each layer's injection


Rope = tuple[Tensor, Tensor]  # fp32 cos and sin, [N, T, 1, D]


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


def norm_rotate(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Head-wise RMSNorm, then rotary embedding, both in fp32: ``x`` [N, T, H, D], ``cos`` and ``sin`` [N, T, 1, D]."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
    return rotate(x, cos, sin).to(dtype)


class _Attention(nn.Module):
    rotary: Callable[..., Tensor] = staticmethod(norm_rotate)

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        d, size = shape.hidden_size, shape.head_dim
        self.heads, self.kv_heads, self.size = shape.num_heads, shape.num_kv_heads, size
        self.q_proj = nn.Linear(d, self.heads * size, bias=False)
        self.k_proj = nn.Linear(d, self.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(d, self.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(self.heads * size, d, bias=False)
        self.q_norm = _Norm(size, shape.rms_norm_eps)
        self.k_norm = _Norm(size, shape.rms_norm_eps)

    def keys_values(self, rows: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Keys and values [N, T, Hkv, D] of ``rows`` [N, T, d]."""
        v = self.v_proj(rows).unflatten(-1, (self.kv_heads, self.size))
        k = self.k_proj(rows).unflatten(-1, (self.kv_heads, self.size))
        return self.rotary(k, self.k_norm.weight, self.k_norm.eps, *rope, v.dtype), v

    def forward(self, rows: Tensor, context: tuple[Tensor, Tensor], rope: Rope, bias: Tensor) -> Tensor:
        """``rows`` [N, Q, d] attend to the context's keys and values and to themselves; ``bias`` [N, 1, Q, T + Q]."""
        own_k, own_v = self.keys_values(rows, rope)
        k, v = torch.cat((context[0], own_k), 1), torch.cat((context[1], own_v), 1)
        q = self.q_proj(rows).unflatten(-1, (self.heads, self.size))
        q = self.rotary(q, self.q_norm.weight, self.q_norm.eps, *rope, v.dtype).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = (t.transpose(1, 2)[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(v.dtype).expand(-1, self.heads, -1, -1))
        return self.o_proj(attended.transpose(1, 2).flatten(-2))


class _Mlp(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = _Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = _Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = _Mlp(shape)

    def forward(self, x: Tensor, context: tuple[Tensor, Tensor], rope: Rope, bias: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, bias)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Injection(nn.Module):
    """Gated adjacent injection; ``message``, the two gates and ``bias`` are shared by all layers."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        d, r, m = shape.hidden_size, shape.rank, shape.message_size
        self.scale = math.sqrt(r)
        self.readouts = nn.ModuleList(nn.Linear(d, r, bias=False) for _ in range(shape.num_layers))
        self.writes = nn.ModuleList(nn.Linear(m, d, bias=False) for _ in range(shape.num_layers))
        self.message = nn.Linear(r, m, bias=False)
        self.receiver_gate = nn.Linear(r, m, bias=False)
        self.predecessor_gate = nn.Linear(r, m, bias=False)
        self.bias = nn.Parameter(torch.zeros(m))

    def feature(self, hidden: Tensor, layer: int) -> Tensor:
        """phi_l: [.., d] -> fp32 [.., r] of length sqrt(r)."""
        return self.scale * F.normalize(self.readouts[layer](hidden).float(), dim=-1)

    def write(self, hidden: Tensor, receiver: Tensor, predecessor: Tensor, layer: int) -> Tensor:
        """``hidden`` [.., d] plus the gated message of ``predecessor`` [.., r], scaled by the root mean square of ``hidden``."""
        gate = torch.sigmoid(self.receiver_gate(receiver) + self.predecessor_gate(predecessor) + self.bias)
        scale = hidden.float().norm(dim=-1, keepdim=True) / math.sqrt(hidden.shape[-1])
        return hidden + scale * self.writes[layer](gate * self.message(predecessor))


class TrainDrafter(nn.Module):
    """The drafter with its frozen token codes."""

    codes: Tensor  # [V, r] unit rows
    tap_scale: Tensor  # [A*d] divides the tapped columns while training; `fold` moves it into fc

    def __init__(self, shape: DrafterShape, codes: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = _Norm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_layers))
        self.norm = _Norm(shape.hidden_size, shape.rms_norm_eps)
        self.injection = _Injection(shape)
        self.pair = PairHead(shape.head, shape.vocab_size, shape.hidden_size, shape.head_rank) if shape.head else None
        self.register_buffer("codes", codes.float(), persistent=False)
        self.register_buffer("tap_scale", torch.ones(len(shape.taps) * shape.hidden_size), persistent=False)

    @torch.no_grad()
    def fold(self) -> None:
        """Make ``fc`` read the raw taps: what the specification model, and so the checkpoint, expects."""
        self.fc.weight.div_(self.tap_scale)
        self.tap_scale.fill_(1.0)

    @torch.no_grad()
    def initialise(self, directions: Tensor) -> None:
        """Small normal matrices; readouts start on the lm_head's principal directions [r, d]; writes and the predecessor gate start at
        zero, so training begins from the plain backbone.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and not name.startswith("pair."):
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.div_(math.sqrt(2 * self.shape.num_layers))
        for name, parameter in self.injection.named_parameters():
            if name.startswith("readouts."):
                parameter.copy_(directions)
            elif name.startswith("writes."):
                parameter.zero_()
        self.injection.predecessor_gate.weight.zero_()
        if self.pair is not None:
            self.pair.initialise()

    def code(self, ids: Tensor) -> Tensor:
        """sqrt(r) times the token's unit code, [.., r]."""
        return self.injection.scale * F.embedding(ids, self.codes)

    def forward(
        self, embedded: Tensor, tapped: Tensor, ids: Tensor, positions: Tensor, bias: Tensor, replaced: Tensor | None = None
    ) -> DraftPass:
        """Run the blocks.

        Args:
            embedded: [N, M, B, d] target embeddings of [anchor, mask, ...].
            tapped: [N, T, A*d] target hidden states.
            ids: [N, M, B] true tokens of the block; only the anchor is read unless ``replaced`` is given.
            positions: [N, M, B] absolute positions.
            bias: [N, 1, M*B, T + M*B] additive mask.
            replaced: [N, M] blocks whose early layers receive the true predecessors' codes.
        """
        count = ids.shape[0]
        steps = torch.arange(tapped.shape[1], device=tapped.device).expand(count, -1)
        context = self.context(tapped.float() / self.tap_scale, self.rope(steps))
        return self.run(embedded, context, ids, self.rope(positions.flatten(1)), bias, replaced)

    def rope(self, positions: Tensor) -> Rope:
        """Rotary tables of ``positions`` [N, T]."""
        cos, sin = rope_tables(positions, self.shape.head_dim, self.shape.rope_theta)
        return cos[:, :, None], sin[:, :, None]

    def context(self, scaled: Tensor, rope: Rope) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every layer, [N, T, Hkv, D] each, from tapped states [N, T, A*d] already divided by ``tap_scale``."""
        rows = self.hidden_norm(self.fc(scaled))
        return [layer.self_attn.keys_values(rows, rope) for layer in self.layers]  # type: ignore[operator,union-attr]

    def run(
        self,
        embedded: Tensor,
        context: list[tuple[Tensor, Tensor]],
        ids: Tensor,
        rope: Rope,
        bias: Tensor,
        replaced: Tensor | None = None,
    ) -> DraftPass:
        """The blocks against given context keys and values; ``rope`` covers the block rows, the rest is as in `forward`."""
        _, blocks, size = ids.shape
        x, before, outputs = embedded.float().flatten(1, 2), embedded, []
        early = self.shape.num_layers * 3 // 5  # the recipe replaces predecessors in 3 of 5 layers
        for index, layer in enumerate(self.layers):
            x = layer(x, context[index], rope, bias)
            before = x.unflatten(1, (blocks, size))
            after = self._inject(before, index, ids, replaced if index < early else None) if self.shape.inject else before
            outputs.append(after)
            x = after.flatten(1, 2)
        return DraftPass(self.norm(outputs[-1]), before, outputs)

    def _inject(self, hidden: Tensor, layer: int, ids: Tensor, replaced: Tensor | None) -> Tensor:
        feature = self.injection.feature(hidden, layer)
        predecessor = torch.cat((self.code(ids[..., :1]), feature[..., 1:-1, :]), dim=-2)
        if replaced is not None:
            predecessor = torch.where(replaced[..., None, None], self.code(ids[..., :-1]), predecessor)
        written = self.injection.write(hidden[..., 1:, :], feature[..., 1:, :], predecessor, layer)
        return torch.cat((hidden[..., :1, :], written), dim=-2)

    def refine(self, pre_injection: Tensor, predecessors: Tensor) -> Tensor:
        """The last write redone with known predecessor tokens, then the final norm: [.., d] and [..] ids -> [.., d]."""
        last = self.shape.num_layers - 1
        receiver = self.injection.feature(pre_injection, last)
        return self.norm(self.injection.write(pre_injection, receiver, self.code(predecessors), last))


def block_bias(lengths: Tensor, width: int, blocks: int, size: int, causal: bool) -> Tensor:
    """Additive mask [N, 1, M*B, T + M*B]: context rows before the block's anchor, then the block's own rows.

    Args:
        lengths: [N, M] context length of every block (the anchor's position).
        width: T, context rows in the batch.
    """
    rows = torch.arange(blocks * size, device=lengths.device)
    block, slot = rows // size, rows % size
    own = block[:, None] == block[None, :]
    if causal:
        own &= slot[None, :] <= slot[:, None]
    before = torch.arange(width, device=lengths.device) < lengths.repeat_interleave(size, 1)[..., None]  # [N, M*B, T]
    visible = torch.cat((before, own.expand(lengths.shape[0], -1, -1)), dim=-1)
    return torch.zeros(visible.shape, device=lengths.device, dtype=torch.float32).masked_fill_(~visible, float("-inf"))[:, None]
