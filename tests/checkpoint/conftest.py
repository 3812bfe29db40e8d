"""Builders of checkpoints that differ from a valid one in exactly one respect."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden"


@dataclass
class DrafterBuilder:
    """A copy of a golden drafter in memory; edit `config` and `tensors`, then `write`."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def dflash(self) -> dict[str, Any]:
        return self.config["dflash_config"]

    @property
    def dspine(self) -> dict[str, Any]:
        return self.config["dspine_config"]

    def write(self) -> Path:
        self.path.mkdir(exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.path / "model.safetensors")
        return self.path

    def to_dflash(self) -> DrafterBuilder:
        """Plain DFlash: no injection, no codes, mask not stated."""
        self.config["architectures"] = ["DFlashDraftModel"]
        for key in ("dspine_config", "is_causal"):
            del self.config[key]
        dropped = ("injection.", "transfer_")
        self.tensors = {name: value for name, value in self.tensors.items() if not name.startswith(dropped)}
        return self

    def to_reference(self) -> DrafterBuilder:
        """The independent reference layout: no dspine_config, codes in a file of their own."""
        for key in ("dspine_config", "is_causal"):
            del self.config[key]
        del self.tensors["transfer_ready"]
        self.path.mkdir(exist_ok=True)
        save_file({"codes": self.tensors.pop("transfer_codes")}, self.path / "transfer.safetensors")
        return self


@dataclass
class TargetBuilder:
    """A two-matrix Hugging Face target that fits the golden drafter `b4_mha_k1`."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def write(self) -> Path:
        self.path.mkdir(exist_ok=True)
        (self.path / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.path / "model.safetensors")
        return self.path


@pytest.fixture
def drafter(tmp_path: Path) -> DrafterBuilder:
    source = GOLDEN / "b4_mha_k1" / "drafter"
    return DrafterBuilder(
        tmp_path / "drafter", json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    )


@pytest.fixture
def target(tmp_path: Path) -> TargetBuilder:
    config = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 48, "vocab_size": 200, "num_hidden_layers": 6}
    matrices = {"model.embed_tokens.weight": torch.ones(200, 48), "lm_head.weight": torch.full((200, 48), 2.0)}
    return TargetBuilder(tmp_path / "target", {**config, "tie_word_embeddings": False}, matrices)


@pytest.fixture
def raw_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a safetensors container from a header (object or raw bytes) and its data."""

    def write(header: object, data: bytes = b"", length: int | None = None, name: str = "raw.safetensors") -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / name
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
        return path

    return write
