"""Naive references of the attention kernels: the oracles of their tests."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def _rotated(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm over the head, then rotate-half. x [R, H, D] float32; cos, sin [R, D/2]."""
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    c, s = cos.float().unsqueeze(1), sin.float().unsqueeze(1)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def append_context_reference(
    rows: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    counts: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """rows [N, T, 2*Hkv*D] (keys, then values) appended behind `lengths` in keys, values [N, Hkv, C, D] (one layer), in place."""
    heads, dim = keys.shape[1], keys.shape[3]
    for n in range(rows.shape[0]):
        count, start = int(counts[n]), int(lengths[n])
        new = rows[n, :count].float()
        k = _rotated(
            new[:, : heads * dim].unflatten(-1, (heads, dim)),
            k_norm,
            eps,
            cos[start : start + count],
            sin[start : start + count],
        )
        keys[n, :, start : start + count] = k.transpose(0, 1).to(keys.dtype)
        values[n, :, start : start + count] = (
            new[:, heads * dim :].unflatten(-1, (heads, dim)).transpose(0, 1).to(values.dtype)
        )


def block_attention_reference(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor, lengths: Tensor,
    keys: Tensor, values: Tensor, heads: int, block: int, causal: bool, window: int | None,
) -> Tensor:  # fmt: skip
    """qkv [N*B, (H + 2 Hkv) D], keys, values [N, Hkv, C, D] -> float32 [N*B, H*D]."""
    kv_heads, dim = keys.shape[1], keys.shape[3]
    out = []
    for n in range(keys.shape[0]):
        length = int(lengths[n])
        positions = torch.arange(length, length + block, device=qkv.device)
        rows = qkv[n * block : (n + 1) * block].float().unflatten(-1, (heads + 2 * kv_heads, dim))
        q = _rotated(rows[:, :heads], q_norm, eps, cos[positions], sin[positions])
        k = _rotated(rows[:, heads : heads + kv_heads], k_norm, eps, cos[positions], sin[positions])
        k = torch.cat((keys[n, :, :length].float(), k.transpose(0, 1)), dim=1)
        v = torch.cat((values[n, :, :length].float(), rows[:, heads + kv_heads :].transpose(0, 1)), dim=1)
        k, v = (t.repeat_interleave(heads // kv_heads, 0) for t in (k, v))
        where = torch.arange(length + block, device=qkv.device)
        mask = (
            where[None, :] <= positions[:, None]
            if causal
            else torch.ones(block, length + block, dtype=torch.bool, device=qkv.device)
        )
        if window is not None:
            mask = mask & (positions[:, None] - where[None, :] < window)
        attended = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask)
        out.append(attended.transpose(0, 1).flatten(1))
    return torch.cat(out)
