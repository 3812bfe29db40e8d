"""What is measured: a drafter's shapes with random weights. Zeros would run faster than real data does."""

from __future__ import annotations

from dataclasses import replace

import torch

from dspine_export.checkpoint.config import DrafterConfig, TransferConfig
from dspine_export.model.drafter import Drafter
from dspine_export.model.drafter_model import DrafterModel

QWEN3_8B = DrafterConfig(
    layout="specforge", architecture="DSpineDraftModel", hidden_size=4096, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=12288, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960, block_size=16,
    mask_token_id=151669, target_layer_ids=(1, 9, 17, 25, 33), num_target_layers=36, is_causal=True, layer_types=("full_attention",) * 5,
    sliding_window=None, dtype="bfloat16", transfer=TransferConfig(rank=1024, message_size=512, top_k=16),
)  # fmt: skip


def kinds(config: DrafterConfig) -> dict[str, DrafterConfig]:
    """The drafter and, where it is a DSpine one, the same backbone without injection and transition."""
    if config.transfer is None:
        return {"DFlash": config}
    return {"DFlash": replace(config, transfer=None), "DSpine": config}


def random_drafter(config: DrafterConfig, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Drafter:
    """A drafter with weights scaled so that activations stay in range."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        model = DrafterModel(config)
    model = model.to(dtype).to_empty(device=device)
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.fill_(1.0)
        elif name == "transfer_codes":
            tensor.normal_(generator=generator)
            tensor.div_(tensor.float().norm(dim=-1, keepdim=True))
        else:
            tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
    tables = [torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype) for _ in range(2)]
    for tensor in tables:
        tensor.normal_(std=0.03, generator=generator)
    return Drafter(model.eval().requires_grad_(False), *tables)
