"""The golden cases, checkpoints derived from them, and drafters with random weights of any configuration."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspine_export import load_checkpoint
from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.model.drafter import Drafter
from dspine_export.model.drafter_model import DrafterModel
from dspine_export.tolerance import TOLERANCES

GOLDEN = Path(__file__).parent / "golden"
CASES = ("b8_gqa", "b16_qwen_ratio", "b4_mha_k1")


@functools.cache
def golden_io(case: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / case / "io.safetensors")


def drafter_path(case: str) -> Path:
    return GOLDEN / case / "drafter"


@functools.cache
def golden_drafter(case: str, dtype: torch.dtype = torch.float32) -> Drafter:
    io = golden_io(case)
    embed, head = io["embed_tokens.weight"].to(dtype), io["lm_head.weight"].to(dtype)
    return load_checkpoint(drafter_path(case)).bind(embed_tokens=embed, lm_head=head)


def golden_config(case: str) -> DrafterConfig:
    return golden_drafter(case).config


def write_dflash(case: str, folder: Path, *, is_causal: bool) -> Path:
    """The golden drafter without injection and refinement: a DFlash checkpoint."""
    config = json.loads((drafter_path(case) / "config.json").read_text())
    config |= {"architectures": ["DFlashDraftModel"], "is_causal": is_causal}
    del config["dspine_config"]
    tensors = load_file(drafter_path(case) / "model.safetensors")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    dropped = ("injection.", "transfer_")
    save_file({k: v for k, v in tensors.items() if not k.startswith(dropped)}, folder / "model.safetensors")
    return folder


def write_target(case: str, folder: Path) -> Path:
    """The target's two matrices as a Hugging Face directory."""
    config, io = golden_config(case), golden_io(case)
    folder.mkdir(parents=True, exist_ok=True)
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_target_layers,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    matrices = {"model.embed_tokens.weight": io["embed_tokens.weight"], "lm_head.weight": io["lm_head.weight"]}
    save_file(matrices, folder / "model.safetensors")
    return folder


def small_config(**changes: object) -> DrafterConfig:
    """b4_mha_k1's configuration with top_k 4, changed field by field; `rank`, `message_size` and `top_k` reach into `transfer`."""
    config = golden_config("b4_mha_k1")
    assert config.transfer is not None
    inner = {"top_k": 4} | {key: changes.pop(key) for key in ("rank", "message_size", "top_k") if key in changes}
    config = replace(config, transfer=replace(config.transfer, **inner))  # type: ignore[arg-type]
    return replace(config, **changes)  # type: ignore[arg-type]


def random_drafter(config: DrafterConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Drafter:
    """A drafter with random weights and unit codes; matrices keep the scale of what they multiply."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    model = DrafterModel(config).double()
    state = {}
    for name, value in model.state_dict().items():
        values = draw(*value.shape)
        state[name] = 1 + 0.1 * values if value.ndim == 1 else values / value.shape[-1] ** 0.5
    if config.transfer is not None:
        state["transfer_codes"] = torch.nn.functional.normalize(draw(config.vocab_size, config.transfer.rank), dim=-1)
    model.load_state_dict(state)
    table = (config.vocab_size, config.hidden_size)
    embed, head = draw(*table), draw(*table) / config.hidden_size**0.5
    return Drafter(model.to(dtype).eval().requires_grad_(False), embed.to(dtype), head.to(dtype))


def random_context(drafter: Drafter, lengths: list[int], seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors [N], tapped states [N, T, A*d] and lengths [N], T the longest of them and at least 1."""
    generator = torch.Generator().manual_seed(seed)
    config = drafter.config
    shape = (len(lengths), max(1, *lengths), config.num_taps * config.hidden_size)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64).to(drafter.embed_tokens.dtype)
    anchors = torch.randint(0, config.vocab_size, (len(lengths),), generator=generator)
    return anchors, hidden, torch.tensor(lengths)


def assert_close(got: Tensor, want: Tensor, dtype: str = "float32") -> None:
    """Within the tolerance table, element by element and as a whole; NaN fails."""
    bound = TOLERANCES[dtype]
    got, want = got.double(), want.double()
    assert got.shape == want.shape
    error = (got - want).abs()
    assert bool((error <= bound.absolute + bound.relative * want.abs()).all()), (
        f"largest error {float(error.max()):.3e}"
    )
    assert float(error.norm()) <= bound.frobenius * float(want.norm()), float(error.norm() / want.norm())
