"""What no implementation can beat: weights read once, K/V read once, the arithmetic at the measured rate of a large product."""

from __future__ import annotations

from dataclasses import dataclass

from dspine_export.checkpoint.config import DrafterConfig


@dataclass(frozen=True)
class Ceilings:
    """Measured on the device the benchmark runs on."""

    copy_gb_s: float
    gemm_tflop_s: float


def weight_count(config: DrafterConfig) -> int:
    """Weights that a draft pass reads, lm_head included; rows that are looked up (embedding, token table) are not counted."""
    d, f = config.hidden_size, config.intermediate_size
    attention = config.head_dim * d * (2 * config.num_heads + 2 * config.num_kv_heads)
    weights = config.num_layers * (attention + 3 * d * f) + config.vocab_size * d
    if config.transfer is not None:
        r, m = config.transfer.rank, config.transfer.message_size
        weights += config.num_layers * (d * r + d * m) + 3 * m * r
    return weights


def cache_bytes(config: DrafterConfig, batch: int, context: int, element_bytes: int = 2) -> int:
    """Keys and values of `context` tokens for every sequence."""
    return 2 * element_bytes * batch * context * config.num_layers * config.num_kv_heads * config.head_dim


def floor_us(
    config: DrafterConfig, batch: int, context: int, ceilings: Ceilings, weight_bytes: float = 2
) -> dict[str, float]:
    """max(weight bytes / bandwidth, FLOP / GEMM rate) + K/V bytes / bandwidth in microseconds, with its parts."""
    weights = weight_count(config)
    read = weights * weight_bytes / ceilings.copy_gb_s / 1e3
    flop = 2 * weights * batch * config.block_size / ceilings.gemm_tflop_s / 1e6
    kv = cache_bytes(config, batch, context) / ceilings.copy_gb_s / 1e3
    return {"weights": read, "flop": flop, "kv": kv, "total": max(read, flop) + kv}
