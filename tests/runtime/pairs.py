"""Tiny targets and drafters, written as the directories the product reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dspine_export.checkpoint.expected_tensors import expected_shapes
from dspine_export.checkpoint.parse_config import parse_config
from dspine_export.model.transfer import transfer_codes


@dataclass(frozen=True)
class Pair:
    target: Path
    drafter: Path


def write_target(folder: Path, *, seed: int = 0, spread: float = 1.0, **changes: Any) -> Path:
    """A random Qwen3 (or, with model_type, Llama) model; `spread` scales the head, so that the distribution is not flat."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.4,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    } | changes
    torch.manual_seed(seed)
    llama = sizes.pop("model_type", "qwen3") == "llama"
    model = LlamaForCausalLM(LlamaConfig(**sizes)) if llama else Qwen3ForCausalLM(Qwen3Config(**sizes))
    with torch.no_grad():
        model.lm_head.weight.mul_(spread)
    model.save_pretrained(folder)
    return folder


def drafter_config(target: Path, **changes: Any) -> dict[str, Any]:
    """config.json of a small drafter for `target`."""
    sizes = json.loads((target / "config.json").read_text())
    config: dict[str, Any] = {
        "architectures": ["DSpineDraftModel"],
        "model_type": "qwen3",
        "hidden_size": sizes["hidden_size"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "is_causal": True,
        "block_size": 4,
        "num_target_layers": sizes["num_hidden_layers"],
        "layer_types": ["full_attention", "full_attention"],
        "dtype": "float32",
        "dflash_config": {"mask_token_id": sizes["vocab_size"] - 1, "target_layer_ids": [0, 2]},
        "dspine_config": {"transfer_rank": 6, "message_size": 5, "top_k": 4},
    }
    return config | changes


def write_drafter(
    folder: Path,
    target: Path,
    lm_head: Tensor,
    weights: dict[str, Tensor] | None = None,
    *,
    seed: int = 1,
    **changes: Any,
) -> Path:
    """A drafter with random weights (or the given ones) and codes of `lm_head`; a DFlash one with architectures so changed."""
    config = drafter_config(target, **changes)
    if config["architectures"] == ["DFlashDraftModel"]:
        del config["dspine_config"]
    parsed = parse_config(config, "config.json", {}, False, [])
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in expected_shapes(parsed).items()
    }
    if parsed.transfer is not None:
        tensors |= {
            "transfer_codes": transfer_codes(lm_head, parsed.transfer.rank),
            "transfer_ready": torch.tensor(True),
        }
    tensors |= weights or {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


BIGRAM_TOKENS, BIGRAM_BLOCK, BIGRAM_EOS = 48, 8, 1


def bigram_successor() -> Tensor:
    """The permutation that the bigram target follows: one cycle through all tokens, int64 [V]."""
    order = torch.randperm(BIGRAM_TOKENS, generator=torch.Generator().manual_seed(5))
    successor = torch.empty_like(order)
    successor[order] = order.roll(-1)
    return successor


def write_bigram_pair(folder: Path) -> Pair:
    """A target whose next token is a permutation of its last one, and a drafter that knows the permutation.

    Target: layers that write nothing, an orthonormal embedding, and lm_head row p(v) = embedding of v.
    Drafter: its one layer writes nothing either, and the last write maps the predecessor's code to the predecessor's embedding, so the
    transition scores rank p(predecessor) first. Every candidate is a candidate (K = V), so only predecessors decide.
    """
    vocab, d = BIGRAM_TOKENS, 64
    target = write_target(folder / "target", vocab_size=vocab, hidden_size=d, num_hidden_layers=2)
    embed = torch.linalg.qr(torch.randn(d, vocab, generator=torch.Generator().manual_seed(3)))[0].T
    lm_head = torch.empty(vocab, d)
    lm_head[bigram_successor()] = embed
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embed)
        model.lm_head.weight.copy_(lm_head)
    model.save_pretrained(target)
    rank = vocab - 1
    code_to_embedding = torch.linalg.lstsq(transfer_codes(lm_head, rank), embed - embed.mean(0)).solution  # [r, d]
    nothing = {
        f"layers.0.{name}.weight": torch.zeros(d, width)
        for name, width in (("self_attn.o_proj", 32), ("mlp.down_proj", 48))
    }
    known = {
        "injection.message.weight": torch.eye(rank),
        "injection.receiver_gate.weight": torch.zeros(rank, rank),
        "injection.predecessor_gate.weight": torch.zeros(rank, rank),
        "injection.bias": torch.full((rank,), 20.0),  # gates wide open
        "injection.writes.0.weight": 100 * code_to_embedding.T,
    }
    drafter = write_drafter(
        folder / "drafter",
        target,
        lm_head,
        nothing | known,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        block_size=BIGRAM_BLOCK,
        dflash_config={"mask_token_id": 0, "target_layer_ids": [0]},
        dspine_config={"transfer_rank": rank, "message_size": rank, "top_k": vocab},
    )
    return Pair(target, drafter)


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges (ids 0..255 are bytes), an end token 256, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<end>' }}{% endfor %}assistant: "
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
