"""The drafter's files, copied into the bundle and hashed on the way; the target's configuration, hashed where it lies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from dspine_export.bundle import DrafterSummary, FileEntry, SourceFile, sha256_of
from dspine_export.checkpoint.load import Checkpoint
from dspine_export.checkpoint.target import TargetInfo

DRAFTER_FOLDER = "drafter"
_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_CHUNK_BYTES = 4 << 20


def drafter_files(checkpoint: Checkpoint) -> list[Path]:
    """The files that make up a checkpoint: configuration, shard index and every file a tensor lies in."""
    tensors = {info.path for info in checkpoint.tensors.values()}
    extra = [checkpoint.path / name for name in (_CONFIG, _INDEX)]
    return sorted({*(path for path in extra if path.is_file()), *tensors}, key=lambda path: path.name)


def copy_drafter(checkpoint: Checkpoint, staging: Path) -> tuple[list[SourceFile], list[FileEntry]]:
    """Copy the drafter into ``staging/drafter``, links resolved; returns its sources and the bundle's entries, read once for both."""
    folder = staging / DRAFTER_FOLDER
    folder.mkdir()
    sources, entries = [], []
    for path in drafter_files(checkpoint):
        digest, size = _copy(path, folder / path.name)
        sources.append(SourceFile(role="drafter", name=path.name, sha256=digest, size_bytes=size))
        entries.append(FileEntry(path=f"{DRAFTER_FOLDER}/{path.name}", sha256=digest, size_bytes=size))
    return sources, entries


def target_source(target: TargetInfo) -> SourceFile:
    """The target's ``config.json``."""
    path = target.path / _CONFIG
    return SourceFile(role="target", name=_CONFIG, sha256=sha256_of(path), size_bytes=path.stat().st_size)


def summarise(checkpoint: Checkpoint) -> DrafterSummary:
    """The drafter's identity for the manifest."""
    config, transfer = checkpoint.config, checkpoint.config.transfer
    return DrafterSummary(
        architecture=config.architecture,
        layout=config.layout,
        is_causal=config.is_causal,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,
        transfer_rank=transfer.rank if transfer else None,
        message_size=transfer.message_size if transfer else None,
        top_k=transfer.top_k if transfer else None,
    )


def _copy(source: Path, destination: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with destination.open("xb") as output:
        for chunk in _chunks(source):
            digest.update(chunk)
            output.write(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
