"""Writing a trained drafter in the SpecForge layout: config.json and bfloat16 safetensors, transfer codes left to be recomputed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dspine_export.model.transfer import transfer_codes
from tools.training.codes import transfer_probe
from tools.training.drafter import DrafterShape, TrainDrafter
from tools.training.target import Target

SHARD_BYTES = 15_000_000
BASIS = "eigh-float64-canonical-v1"


def drafter_config(shape: DrafterShape, num_target_layers: int, probe: dict[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a drafter; one trained without injection is a DFlash drafter and says so."""
    config: dict[str, Any] = {
        "architectures": ["DSpineDraftModel" if shape.inject else "DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": shape.block_size,
        "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.taps)},
        "dtype": "bfloat16",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "is_causal": shape.causal,
        "layer_types": ["full_attention"] * shape.num_layers,
        "max_position_embeddings": 8192,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "num_target_layers": num_target_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
    }
    if shape.inject:
        config["dspine_config"] = {
            "transfer_rank": shape.rank,
            "message_size": shape.message_size,
            "top_k": shape.top_k,
            "transfer_basis": BASIS,
            "transfer_probe": probe,
        }
    return config


def save_drafter(drafter: TrainDrafter, num_target_layers: int, folder: Path) -> int:
    """Write ``config.json`` and numbered shards below `SHARD_BYTES`; returns the tensors' bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = drafter_config(drafter.shape, num_target_layers, transfer_probe(drafter.codes.cpu()))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    state = {name: value.detach().to("cpu", torch.bfloat16) for name, value in drafter.state_dict().items()}
    if drafter.shape.inject:
        state["transfer_ready"] = torch.tensor(True)
    else:
        state = {name: value for name, value in state.items() if not name.startswith("injection.")}
    return _save_shards(state, folder)


def _save_shards(state: dict[str, torch.Tensor], folder: Path) -> int:
    shards: list[dict[str, torch.Tensor]] = [{}]
    total = held = 0
    for name, value in sorted(state.items()):
        if held + value.nbytes > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = value.contiguous()
        held, total = held + value.nbytes, total + value.nbytes
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": {}}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return total


def load_drafter(folder: Path, target: Target) -> TrainDrafter:
    """A drafter written by `save_drafter`, on the target's device, for measuring; its codes are recomputed from the target's head."""
    raw = json.loads((folder / "config.json").read_text())
    dspine = raw.get("dspine_config") or {"transfer_rank": 1, "message_size": 1, "top_k": 1}
    shape = DrafterShape(
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        intermediate_size=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        taps=tuple(raw["dflash_config"]["target_layer_ids"]),
        block_size=raw["block_size"],
        mask_token_id=raw["dflash_config"]["mask_token_id"],
        rank=dspine["transfer_rank"],
        message_size=dspine["message_size"],
        top_k=dspine["top_k"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=raw["rope_theta"],
        causal=raw["is_causal"],
        inject="dspine_config" in raw,
    )
    drafter = TrainDrafter(shape, transfer_codes(target.head, shape.rank))
    weights = {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
    weights.pop("transfer_ready", None)
    drafter.load_state_dict(weights, strict=shape.inject)
    return drafter.to(target.device)
