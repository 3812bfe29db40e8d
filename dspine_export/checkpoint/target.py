"""The target model's side: depth, sizes and the two matrices the drafter borrows, from a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dspine_export.checkpoint.bounded_json import read_json_object
from dspine_export.checkpoint.config_keys import is_neutral
from dspine_export.checkpoint.expected_tensors import WEIGHT_DTYPES
from dspine_export.checkpoint.finite import check_tensor_finite
from dspine_export.checkpoint.safetensors_store import TensorInfo, TensorStore
from dspine_export.checkpoint.tensor_files import open_directory, require_directory
from dspine_export.errors import CheckpointError

if TYPE_CHECKING:
    import torch

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_MAX_TOKENIZER_BYTES = 128 * 1024 * 1024
# Targets whose logits or embeddings are more than a matrix; 1.0 is as good as absent.
_SCALED = ("final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier", "scale_emb")

_Size = Annotated[int, Field(strict=True, ge=1, le=2**24)]


class _RawTarget(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    architectures: tuple[str, ...] = ()
    hidden_size: _Size
    vocab_size: _Size
    num_hidden_layers: _Size
    tie_word_embeddings: bool | None = None


@dataclass(frozen=True)
class TargetInfo:
    """What a drafter must agree with. `vocab_size` counts lm_head rows, padding included; a tied lm_head is the embedding itself."""

    path: Path
    architecture: str
    hidden_size: int
    vocab_size: int
    config_vocab_size: int
    num_layers: int
    tie_word_embeddings: bool
    embed: TensorInfo
    lm_head: TensorInfo
    tokenizer_vocab: int | None
    tensors: TensorStore

    def read_embed_tokens(self) -> torch.Tensor:
        """The embedding [V, d] in its stored dtype, memory mapped."""
        return self.tensors.read(self.embed.name)

    def read_lm_head(self) -> torch.Tensor:
        """The output matrix [V, d] in its stored dtype, memory mapped."""
        return self.tensors.read(self.lm_head.name)


def read_target(path: str | Path) -> TargetInfo:
    """Read the Hugging Face model directory `path` (single or sharded safetensors); only the two matrices are described.

    Raises:
        CheckpointError: not such a directory, damaged, multimodal, quantised or scaled where the drafter needs plain matrices.
    """
    path = Path(path)
    try:
        require_directory(path)
        raw_json = read_json_object(path / "config.json")
        raw = _parse(raw_json, str(path / "config.json"))
        store = open_directory(path)
    except OSError as error:
        raise CheckpointError("Target cannot be read", where=error.filename or path, got=error.strerror) from None
    embed = _matrix(store, EMBEDDING, raw.hidden_size, path)
    tied = raw.tie_word_embeddings if raw.tie_word_embeddings is not None else LM_HEAD not in store
    lm_head = embed if tied else _matrix(store, LM_HEAD, raw.hidden_size, path)
    if lm_head.shape != embed.shape:
        raise CheckpointError(
            "Embedding and lm_head differ in shape", where=path, got=f"{list(embed.shape)} and {list(lm_head.shape)}"
        )
    return TargetInfo(
        path=path,
        architecture=next(iter(raw.architectures), "unknown"),
        hidden_size=raw.hidden_size,
        vocab_size=lm_head.shape[0],
        config_vocab_size=raw.vocab_size,
        num_layers=raw.num_hidden_layers,
        tie_word_embeddings=tied,
        embed=embed,
        lm_head=lm_head,
        tokenizer_vocab=_tokenizer_vocab(path),
        tensors=store,
    )


def check_target_finite(target: TargetInfo) -> None:
    """Scan the two matrices for NaN and infinity, one chunk at a time."""
    for name in sorted({target.embed.name, target.lm_head.name}):
        check_tensor_finite(target.tensors, name)


def _parse(raw: Mapping[str, Any], where: str) -> _RawTarget:
    if "text_config" in raw and "hidden_size" not in raw:
        raise CheckpointError(
            "Multimodal target: its language model is nested under text_config",
            where=where,
            fix="pass the text-only model, saved as a causal language model of its own",
        )
    names = raw.get("architectures")
    if isinstance(names, list) and any(
        name.endswith(("DraftModel", "DSparkModel")) for name in names if isinstance(name, str)
    ):
        raise CheckpointError("This is a drafter, not a target model", where=where, fix="pass the target's directory")
    for key in _SCALED:
        if not is_neutral(raw.get(key)) and raw[key] != 1:
            raise CheckpointError(
                f"Target uses {key}, which the drafter's logits do not implement", where=where, got=ascii(raw[key])[:60]
            )
    if str(raw.get("model_type", "")).startswith("gemma"):
        raise CheckpointError("Gemma targets scale their embeddings, which is not implemented", where=where)
    try:
        return _RawTarget.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"Bad or missing target configuration key {key!r}", where=where, expected=first["msg"]
        ) from None


def _matrix(store: TensorStore, name: str, hidden_size: int, path: Path) -> TensorInfo:
    info = store.get(name)
    if info is None:
        raise CheckpointError(
            f"Target has no {name}", where=path, expected="a causal language model with Hugging Face tensor names"
        )
    if info.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(
            f"Target's {name} is quantised", where=info.path, got=info.dtype, expected=" or ".join(WEIGHT_DTYPES)
        )
    if len(info.shape) != 2 or info.shape[1] != hidden_size or info.shape[0] < 2:
        raise CheckpointError(
            f"Target's {name} has the wrong shape",
            where=info.path,
            got=list(info.shape),
            expected=f"[V, {hidden_size}]",
        )
    return info


def _tokenizer_vocab(path: Path) -> int | None:
    """Largest token id the tokenizer can produce, plus one; None when there is no readable `tokenizer.json`."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        raw = read_json_object(file, _MAX_TOKENIZER_BYTES)
    except CheckpointError:
        return None  # only used for a warning
    model, added = raw.get("model"), raw.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: list[object] = (
        [entry.get("id") for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    )
    if isinstance(vocab, dict):
        ids += vocab.values()
    elif isinstance(vocab, list):
        ids.append(len(vocab) - 1)
    return max((value + 1 for value in ids if isinstance(value, int)), default=None)
