"""Train the lab's second target: a small Qwen3-shaped language model of Python source, from scratch.

    python -m tools.pack_sources --out sources.jsonl.xz
    python -m tools.train_target --sources sources.jsonl.xz --out TARGET --seconds 240

Writes a Hugging Face directory with its own byte-level BPE tokenizer, ``train_prompts.jsonl`` (beginnings of texts for the drafters'
training corpus, from the training packages) and ``prompts/<package>.jsonl`` for every held-out package. The run is bounded by time;
the learning rate follows the share of it that has passed. Tokenising needs no GPU: with ``--prepare`` the tokens are kept in ``tokens.xz``
beside the tokenizer, and a later run over the same directory starts from them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.training.graph_optimiser import GraphOptimiser
from tools.training.optimiser import learning_rate

END, MASK = "<|endoftext|>", "<|mask|>"  # ids 0 and 1; the target never sees the second
CONTEXT = 512
TOKENS = "tokens.xz"
TOKENIZER_CHARACTERS = 20_000_000  # of the training texts; more changes the merges little


@dataclass(frozen=True)
class Source:
    """One file of a package."""

    package: str
    split: str
    text: str


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; the sizes' defaults give 42 M parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sources", type=Path, required=True, help="file written by tools.pack_sources")
    add("--out", type=Path, required=True)
    add("--seconds", type=float, default=240, help="of training, tokenising not counted")
    add("--seed", type=int, default=1)
    add("--vocabulary", type=int, default=8192)
    add("--hidden-size", type=int, default=512)
    add("--intermediate-size", type=int, default=1536)
    add("--layers", type=int, default=12)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=4)
    add("--batch", type=int, default=128, help="sequences of 512 tokens per step")
    add("--lr", type=float, default=3e-3)
    add("--train-prompts", type=int, default=16000)
    add("--held-out-prompts", type=int, default=64, help="per package")
    add("--prepare", action="store_true", help="tokenise only")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def read_sources(path: Path) -> list[Source]:
    """Everything `tools.pack_sources` packed."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [Source(**json.loads(line)) for line in lines]


def build_tokenizer(texts: Sequence[str], size: int) -> Any:
    """A byte-level BPE of ``size`` tokens whose first two are the end and the mask token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END, MASK], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of every text, an end token in front."""
    return [[0, *encoding.ids] for start in range(0, len(texts), 2000) for encoding in tokenizer.encode_batch(texts[start : start + 2000])]


def beginnings(tokenizer: Any, encoded: Sequence[list[int]], count: int, rng: random.Random) -> list[str]:
    """``count`` beginnings: a window of 48 to 160 tokens from a random place of a random text, from a line's start on."""
    texts: list[str] = []
    long_enough = [ids for ids in encoded if len(ids) > 240]
    for _ in range(20 * count):
        ids = rng.choice(long_enough)
        start = rng.randrange(1, len(ids) - 200)
        text = tokenizer.decode(ids[start : start + rng.randint(64, 176)], skip_special_tokens=False)
        text = text[text.find("\n") + 1 :]
        if len(text) > 80 and "\ufffd" not in text and text not in texts[-1:]:
            texts.append(text)
        if len(texts) == count:
            break
    return texts


def build_model(a: argparse.Namespace, vocabulary: int) -> Any:
    """A freshly initialised Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(a.seed)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=a.hidden_size, intermediate_size=a.intermediate_size, num_hidden_layers=a.layers,
        num_attention_heads=a.heads, num_key_value_heads=a.kv_heads, head_dim=a.hidden_size // a.heads, tie_word_embeddings=True,
        max_position_embeddings=2048, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=0, eos_token_id=0,
        pad_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def draw_batch(tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[count, CONTEXT] windows of ``tokens`` [total], which may stay on the device."""
    starts = torch.randint(0, len(tokens) - CONTEXT, (count,), generator=generator)
    return tokens[(starts[:, None] + torch.arange(CONTEXT)).to(tokens.device)].long()


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Mean next-token cross-entropy of ``ids`` [n, T]."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def train_model(model: Any, tokens: Tensor, held_out: Tensor, a: argparse.Namespace) -> dict[str, Any]:
    """Train for ``a.seconds``; returns the log."""
    optimiser = GraphOptimiser(model, a.lr)
    generator = torch.Generator().manual_seed(a.seed)
    began, step, log = time.monotonic(), 0, []
    while (passed := (time.monotonic() - began) / a.seconds) < 1:
        loss = loss_of(model, draw_batch(tokens, a.batch, generator))
        gradients = torch.autograd.grad(loss, optimiser.parameters)
        optimiser.step(gradients, torch.tensor(learning_rate(int(passed * 10_000), 10_000, 0.03), device=tokens.device))
        step += 1
        if step % 100 == 1:  # waits for the device, so that the clock is right
            log.append({"step": step, "seconds": round(time.monotonic() - began, 1), "loss": round(float(loss.detach()), 4)})
            print(json.dumps(log[-1]), flush=True)
    with torch.no_grad():
        check = torch.Generator().manual_seed(0)
        losses = [float(loss_of(model, draw_batch(held_out, 32, check))) for _ in range(8)]
    return {"steps": step, "seen_tokens": step * a.batch * CONTEXT, "held_out_loss": round(sum(losses) / len(losses), 4), "log": log}


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """``tokenizer.json`` and the configuration that makes transformers read it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "mask_token": MASK, "model_max_length": 2048}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def write_prompts(path: Path, texts: Sequence[str], source: str) -> None:
    """A prompt file of plain text beginnings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text, "source": source}) + "\n" for text in texts), encoding="utf-8")


def tokenise(a: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Tokens of the training and the held-out texts; writes tokenizer and prompts."""
    rng, sources = random.Random(a.seed), read_sources(a.sources)
    train = [s.text for s in sources if s.split == "train"]
    rng.shuffle(train)
    share = TOKENIZER_CHARACTERS / max(sum(map(len, train)), 1)
    tokenizer = build_tokenizer(train[: max(int(share * len(train)), 1)], a.vocabulary)
    save_tokenizer(tokenizer, a.out)
    encoded = encode(tokenizer, train)
    write_prompts(a.out / "train_prompts.jsonl", beginnings(tokenizer, encoded, a.train_prompts, rng), "train")
    held_out: list[int] = []
    for package in sorted({s.package for s in sources if s.split == "held_out"}):
        own = encode(tokenizer, [s.text for s in sources if s.package == package])
        write_prompts(a.out / "prompts" / f"{package}.jsonl", beginnings(tokenizer, own, a.held_out_prompts, rng), package)
        held_out += [token for ids in own for token in ids]
    return [token for ids in encoded for token in ids], held_out


def write_tokens(path: Path, parts: Sequence[Sequence[int]]) -> None:
    """Two sequences of tokens below 65,536: a line with their lengths, then 16 bits a token."""
    with lzma.open(path, "wb", preset=6) as out:
        out.write(" ".join(str(len(part)) for part in parts).encode() + b"\n")
        for part in parts:
            out.write(np.asarray(part, "<u2").tobytes())


def read_tokens(path: Path) -> list[Tensor]:
    """What `write_tokens` wrote, int32."""
    with lzma.open(path, "rb") as source:
        lengths = [int(n) for n in source.readline().split()]
        return [torch.from_numpy(np.frombuffer(source.read(2 * n), "<u2").astype(np.int32)) for n in lengths]


def main(argv: list[str] | None = None) -> None:
    """Tokenise, train, write."""
    a = parse_arguments(argv)
    if not (a.out / TOKENS).is_file():
        write_tokens(a.out / TOKENS, tokenise(a))
    device = torch.device(a.device)
    tokens, checked = read_tokens(a.out / TOKENS)
    print(f"{len(tokens)} training tokens, {len(checked)} held out", flush=True)
    if a.prepare:
        return
    vocabulary = len(json.loads((a.out / "tokenizer.json").read_text())["model"]["vocab"])
    model = build_model(a, vocabulary).to(device)
    report = train_model(model, tokens.to(device), checked.to(device), a)
    model.to(torch.bfloat16).save_pretrained(a.out)
    size = sum(p.numel() for p in model.parameters())
    recorded = {name: value.name if isinstance(value, Path) else value for name, value in vars(a).items()}
    summary = {"arguments": recorded, "parameters": size, "training_tokens": len(tokens), "held_out_tokens": len(checked), **report}
    (a.out / "target.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({k: v for k, v in summary.items() if k != "log"}), flush=True)


if __name__ == "__main__":
    main()
