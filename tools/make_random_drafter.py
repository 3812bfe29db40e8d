"""Writes a drafter checkpoint with random weights at a real model's shapes, and a target directory to pair it with.

    python tools/make_random_drafter.py --shape qwen3-8b --out build/random-qwen3-8b

gives ``OUT/drafter`` (SpecForge layout, bfloat16, transfer codes included) and ``OUT/target``: a config.json and a sparse
safetensors file whose embedding and lm_head are holes, zero bytes on disk. It measures exports and builds; the drafts are noise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.checkpoint.expected_tensors import CODES, READY, expected_shapes
from dspine_export.checkpoint.parse_config import parse_config
from dspine_export.checkpoint.target import EMBEDDING, LM_HEAD

CHUNK_ELEMENTS = 1 << 22
SCALE = 0.02

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a target family member that the drafter inherits."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    taps: tuple[int, ...]
    draft_layers: int = 5
    transfer_rank: int = 1024
    message_size: int = 512


SHAPES = {
    "tiny": TargetShape(64, 512, 4, 4, 2, 128, (0, 2), 2, 32, 16),
    "qwen3-4b": TargetShape(2560, 151936, 36, 32, 8, 9728, (1, 9, 17, 25, 33)),
    "qwen3-8b": TargetShape(4096, 151936, 36, 32, 8, 12288, (1, 9, 17, 25, 33)),
}


def main(arguments: list[str] | None = None) -> int:
    """Command line; prints what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True, help="new directory")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    write_pair(SHAPES[options.shape], options.out, options.seed)
    size = sum(path.stat().st_size for path in (options.out / "drafter").iterdir())
    print(f"{options.out}: drafter {size / 1e9:.3f} GB, target sparse")
    return 0


def write_pair(shape: TargetShape, out: Path, seed: int = 0) -> None:
    """Write ``out/drafter`` and ``out/target``; ``out`` must not exist yet."""
    (out / "drafter").mkdir(parents=True)
    (out / "target").mkdir()
    write_drafter(shape, out / "drafter", seed)
    write_target(shape, out / "target")


def write_drafter(shape: TargetShape, folder: Path, seed: int) -> None:
    """config.json and model.safetensors with normal weights of deviation 0.02, norm weights near one and unit codes."""
    raw = drafter_config(shape)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    config = parse_config(raw, str(folder / "config.json"), {CODES: ()}, False, [])
    tensors = {name: ("BF16", size) for name, size in expected_shapes(config).items()}
    tensors |= {CODES: ("BF16", (shape.vocab_size, shape.transfer_rank)), READY: ("BOOL", ())}
    generator = np.random.default_rng(seed)
    with (folder / "model.safetensors").open("xb") as file:
        file.write(header(tensors))
        for name, (_, size) in tensors.items():
            for chunk in contents(name, size, config, generator):
                file.write(chunk.tobytes())


def contents(
    name: str, shape: Shape, config: DrafterConfig, generator: np.random.Generator
) -> Iterator[npt.NDArray[Any]]:
    """The tensor's elements, in blocks of whole rows."""
    if name == READY:
        yield np.ones((), np.bool_)
        return
    rows, width = (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else (1, shape[0])
    step = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, rows, step):
        block = generator.standard_normal((min(step, rows - start), width), dtype=np.float32)
        if name == CODES:
            block /= np.linalg.norm(block, axis=1, keepdims=True)
        elif "norm" in name:
            block = 1 + SCALE * block
        else:
            block *= SCALE
        yield bfloat16(block)


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of ``values`` rounded to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_target(shape: TargetShape, folder: Path) -> None:
    """config.json, and a safetensors file that is a header followed by a hole."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 128,
        "intermediate_size": shape.intermediate_size,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    matrix = (shape.vocab_size, shape.hidden_size)
    prefix = header({EMBEDDING: ("BF16", matrix), LM_HEAD: ("BF16", matrix)})
    with (folder / "model.safetensors").open("xb") as file:
        file.write(prefix)
        file.truncate(len(prefix) + 2 * 2 * matrix[0] * matrix[1])


def header(tensors: dict[str, tuple[str, Shape]]) -> bytes:
    """A safetensors header for ``tensors`` laid out one after the other, padded so that the data starts aligned."""
    entries, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape, dtype=np.int64)) * {"BF16": 2, "BOOL": 1}[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def drafter_config(shape: TargetShape) -> dict[str, Any]:
    """config.json of a drafter for ``shape``, as SpecForge writes it."""
    return {
        "architectures": ["DSpineDraftModel"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.draft_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": 128 if shape.hidden_size >= 1024 else 16,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "hidden_act": "silu",
        "rope_theta": 1e6,
        "is_causal": True,
        "block_size": 16,
        "num_target_layers": shape.num_layers,
        "layer_types": ["full_attention"] * shape.draft_layers,
        "dtype": "bfloat16",
        "dflash_config": {
            "mask_token_id": min(151669, shape.vocab_size - 1),
            "target_layer_ids": list(shape.taps),
        },
        "dspine_config": {
            "transfer_rank": shape.transfer_rank,
            "message_size": shape.message_size,
            "top_k": 16,
        },
    }


if __name__ == "__main__":
    raise SystemExit(main())
