"""A tiny random Llama target on disk and a corpus of random sequences for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tools.training.data import Corpus, pack
from tools.training.drafter import DrafterShape
from tools.training.target import Target, load_target

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 96, 32, 5, 4, 2, 8, 48
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * 0.3

    weights = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN), "model.norm.weight": 1 + draw(HIDDEN) / 3}
    for index in range(LAYERS):
        prefix = f"model.layers.{index}."
        weights |= {
            f"{prefix}input_layernorm.weight": 1 + draw(HIDDEN) / 3,
            f"{prefix}post_attention_layernorm.weight": 1 + draw(HIDDEN) / 3,
            f"{prefix}self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": draw(FFN, HIDDEN),
            f"{prefix}mlp.up_proj.weight": draw(FFN, HIDDEN),
            f"{prefix}mlp.down_proj.weight": draw(HIDDEN, FFN),
        }
    return weights


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_weights(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def target(target_dir: Path) -> Target:
    return load_target(target_dir, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    generator = torch.Generator().manual_seed(4)

    def sequence(length: int) -> list[int]:
        return torch.randint(3, VOCAB, (length,), generator=generator).tolist()

    return pack([sequence(5 + i % 4) for i in range(12)], [sequence(9 + 3 * (i % 5)) for i in range(12)])


@pytest.fixture(scope="session")
def shape() -> DrafterShape:
    return DrafterShape(
        hidden_size=HIDDEN, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=40, vocab_size=VOCAB,
        taps=(0, 2, 3), block_size=6, mask_token_id=0, rank=16, message_size=12, top_k=5, rms_norm_eps=1e-6, rope_theta=10000.0,
    )  # fmt: skip
