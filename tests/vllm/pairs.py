"""Targets and drafters small enough for vLLM under the Triton interpreter, with head sizes its attention backends take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspine_export.model.transfer import transfer_codes
from tests.runtime.pairs import BIGRAM_BLOCK, BIGRAM_TOKENS, Pair, bigram_successor, write_drafter, write_target

HIDDEN, HEAD_DIM, HEADS, LAYERS = 64, 32, 4, 2
RANK = BIGRAM_TOKENS - 1


def write_certain_pair(folder: Path) -> Pair:
    """The target's next token is a permutation of its last one, and the drafter knows the permutation: every draft is right.

    As `tests.runtime.pairs.write_bigram_pair`: layers write nothing, the last injection maps the predecessor to its successor.
    """
    target, lm_head, to_embedding = _write_target(folder, layer_scale=0.0, peak=8.0)
    drafter = _write_drafter(
        folder, target, lm_head, _open_gates() | {"injection.writes.0.weight": 100 * to_embedding}, 0.0, BIGRAM_TOKENS
    )
    return Pair(target, drafter)


def write_noisy_pair(folder: Path, top_k: int = BIGRAM_TOKENS - 8) -> Pair:
    """The same permutation under noise from every layer of both models. The target leaves it at one token in ten and is unsure at
    temperature 1; the drafter is surer than the target, and right often, for reasons that include context and injection.
    """
    target, lm_head, to_embedding = _write_target(folder, layer_scale=0.009, peak=5.0)
    generator = torch.Generator().manual_seed(7)
    gates = {
        f"injection.{name}.weight": 0.02 * torch.randn(RANK, RANK, generator=generator)
        for name in ("receiver_gate", "predecessor_gate")
    }
    known = _open_gates() | gates
    known |= {"injection.bias": torch.full((RANK,), 2.0), "injection.writes.0.weight": 50 * to_embedding}
    return Pair(target, _write_drafter(folder, target, lm_head, known, 0.1, top_k))


def _write_target(folder: Path, layer_scale: float, peak: float) -> tuple[Path, Tensor, Tensor]:
    """The target, its head [V, d], and the map from codes to embeddings [d, r]."""
    from transformers import AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
    }
    target = write_target(folder / "target", vocab_size=BIGRAM_TOKENS, **sizes)
    embed = torch.linalg.qr(torch.randn(HIDDEN, BIGRAM_TOKENS, generator=torch.Generator().manual_seed(3)))[0].T
    lm_head = torch.empty(BIGRAM_TOKENS, HIDDEN)
    lm_head[bigram_successor()] = embed * peak / HIDDEN**0.5  # logits of the normed embedding: the peak, and zeros
    model = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(layer_scale)
            layer.mlp.down_proj.weight.mul_(layer_scale)
        model.model.embed_tokens.weight.copy_(embed)
        model.lm_head.weight.copy_(lm_head)
    model.save_pretrained(target)
    to_embedding = torch.linalg.lstsq(transfer_codes(lm_head, RANK), embed - embed.mean(0)).solution.T
    return target, lm_head, to_embedding


def _write_drafter(
    folder: Path, target: Path, lm_head: Tensor, known: dict[str, Tensor], noise: float, top_k: int
) -> Path:
    generator = torch.Generator().manual_seed(11)
    written = {
        f"layers.0.{name}.weight": noise * width**-0.5 * torch.randn(HIDDEN, width, generator=generator)
        for name, width in (("self_attn.o_proj", HEADS * HEAD_DIM), ("mlp.down_proj", 48))
    }
    return write_drafter(
        folder / "drafter", target, lm_head, written | known, num_hidden_layers=1, layer_types=["full_attention"],
        block_size=BIGRAM_BLOCK, head_dim=HEAD_DIM, max_position_embeddings=512,
        dflash_config={"mask_token_id": 0, "target_layer_ids": [0]},
        dspine_config={"transfer_rank": RANK, "message_size": RANK, "top_k": top_k},
    )  # fmt: skip


def _open_gates() -> dict[str, Tensor]:
    return {
        "injection.message.weight": torch.eye(RANK),
        "injection.receiver_gate.weight": torch.zeros(RANK, RANK),
        "injection.predecessor_gate.weight": torch.zeros(RANK, RANK),
        "injection.bias": torch.full((RANK,), 20.0),
    }
