"""The drafter's configuration as vLLM parsed it, in this package's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspine_export.checkpoint.config import FULL_ATTENTION, DrafterConfig, TransferConfig
from dspine_export.errors import CheckpointError

ARCHITECTURE = "DSpineDraftModel"
_RANK_KEYS, _MESSAGE_KEYS = ("transfer_rank", "transfer_dim"), ("message_size", "message_dim")


def drafter_config(parsed: Any) -> DrafterConfig:
    """From vLLM's ``hf_config`` of the drafter; everything in it was validated before, except the sizes of the transfer space.

    Raises:
        CheckpointError: no ``dspine_config``, or sizes missing from it.
    """
    dflash: Mapping[str, Any] = getattr(parsed, "dflash_config", None) or {}
    rope: Mapping[str, Any] = getattr(parsed, "rope_parameters", None) or {}
    return DrafterConfig(
        layout="specforge",
        architecture=ARCHITECTURE,
        hidden_size=parsed.hidden_size,
        num_layers=parsed.num_hidden_layers,
        num_heads=parsed.num_attention_heads,
        num_kv_heads=parsed.num_key_value_heads,
        head_dim=parsed.head_dim,
        intermediate_size=parsed.intermediate_size,
        vocab_size=parsed.vocab_size,
        rms_norm_eps=parsed.rms_norm_eps,
        rope_theta=rope.get("rope_theta", 10000.0),
        max_position_embeddings=parsed.max_position_embeddings,
        block_size=parsed.block_size,
        mask_token_id=dflash["mask_token_id"],
        target_layer_ids=tuple(dflash["target_layer_ids"]),
        num_target_layers=getattr(parsed, "num_target_layers", None),
        is_causal=True,
        layer_types=tuple(getattr(parsed, "layer_types", None) or [FULL_ATTENTION] * parsed.num_hidden_layers),
        sliding_window=getattr(parsed, "sliding_window", None),
        dtype=None,
        transfer=_transfer(getattr(parsed, "dspine_config", None) or {}),
    )


def _transfer(sizes: Mapping[str, Any]) -> TransferConfig:
    rank, message = (next((sizes[key] for key in keys if key in sizes), None) for keys in (_RANK_KEYS, _MESSAGE_KEYS))
    if rank is None or message is None or "top_k" not in sizes:
        raise CheckpointError(
            "The drafter's config.json does not state the sizes of its transfer space",
            where="dspine_config",
            got=sorted(sizes),
            expected="transfer_rank, message_size and top_k",
            fix="dspine-export build --target vllm writes a complete drafter directory",
        )
    return TransferConfig(rank=int(rank), message_size=int(message), top_k=int(sizes["top_k"]))
