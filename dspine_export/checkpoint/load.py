"""Open a drafter checkpoint: every layout in, one validated `Checkpoint` out. Tensor data stays on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspine_export.checkpoint.bounded_json import read_json_object
from dspine_export.checkpoint.config import CANONICAL_TRANSFER_BASIS, DrafterConfig
from dspine_export.checkpoint.expected_tensors import CODES, READY, TARGET_COPIES, canonical_names, check_tensors
from dspine_export.checkpoint.finite import check_tensor_finite
from dspine_export.checkpoint.parse_config import parse_config
from dspine_export.checkpoint.safetensors_store import TensorInfo, TensorStore
from dspine_export.checkpoint.tensor_files import CODES_FILE, open_directory, require_directory
from dspine_export.errors import CheckpointError

CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A validated drafter. `tensors` uses the SpecForge names; `codes` is `transfer_codes` wherever it was stored, None if absent."""

    path: Path
    config: DrafterConfig
    tensors: TensorStore
    codes: TensorInfo | None
    warnings: tuple[str, ...] = ()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Validate the drafter in directory `path` completely, except for non-finite values (`check_finite`).

    Raises:
        CheckpointError: missing, damaged, contradictory or unsupported in any way that could change the drafter's output.
    """
    path = Path(path)
    with _file_errors(path):
        require_directory(path)
        store = open_directory(path)
        raw = read_json_object(path / CONFIG_FILE)
        warnings: list[str] = []
        infos = _canonical(store, warnings)
        has_codes_file = (path / CODES_FILE).exists()
        if has_codes_file:
            _add_codes_file(path / CODES_FILE, infos, warnings)
    shapes = {name: info.shape for name, info in infos.items()}
    config = parse_config(raw, str(path / CONFIG_FILE), shapes, has_codes_file, warnings)
    check_tensors(config, infos, path)
    tensors = TensorStore(infos)
    _check_transfer(config, tensors, path)
    return Checkpoint(path, config, tensors, tensors.get(CODES), tuple(warnings))


def check_finite(checkpoint: Checkpoint) -> None:
    """Scan every tensor for NaN and infinity, one chunk at a time; reads the whole checkpoint once."""
    for name in checkpoint.tensors:
        if name != READY:
            check_tensor_finite(checkpoint.tensors, name)


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError("Checkpoint cannot be read", where=error.filename or path, got=error.strerror) from None


def _canonical(store: TensorStore, warnings: list[str]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for stored, name in canonical_names(store).items():
        if name in TARGET_COPIES:
            warnings.append(f"{stored} in the drafter is ignored: embedding and lm_head are the target's")
        else:
            infos[name] = replace(store[stored], name=name)
    return infos


def _add_codes_file(path: Path, infos: dict[str, TensorInfo], warnings: list[str]) -> None:
    codes = TensorStore.from_files([path])
    if set(codes) != {"codes"}:
        raise CheckpointError(
            "Unexpected tensors in the codes file",
            where=path,
            got=", ".join(map(ascii, sorted(codes)[:6])),
            expected="codes",
        )
    if CODES in infos:
        warnings.append(f"{path.name} is ignored: the model file stores transfer_codes itself")
    else:
        infos[CODES] = replace(codes["codes"], name=CODES)


def _check_transfer(config: DrafterConfig, tensors: TensorStore, path: Path) -> None:
    """Codes must be initialised where they are stored; where they are not, the checkpoint must declare how to rebuild them."""
    if config.transfer is None:
        return
    ready = _stored_flag(tensors)
    if ready is False or (ready is None and CODES in tensors and config.layout == "specforge"):
        raise CheckpointError(
            "The transfer space was never initialised",
            where=f"{path}: {READY}",
            got="missing" if ready is None else "false",
            expected="true",
            fix="this checkpoint was saved before training began; use a later one",
        )
    if CODES in tensors:
        return
    transfer = config.transfer
    if transfer.basis == CANONICAL_TRANSFER_BASIS and transfer.probe is not None:
        return
    raise CheckpointError(
        "transfer_codes are absent and may not be recomputed",
        where=path,
        got=f"transfer_basis {ascii(transfer.basis)[:80]}, transfer_probe {'present' if transfer.probe else 'missing'}",
        expected=f"transfer_basis {CANONICAL_TRANSFER_BASIS!r} and a transfer_probe",
        fix="store the codes: their basis is not unique (signs and rotations of eigenvectors), and the weights depend on it",
    )


def _stored_flag(tensors: Mapping[str, Any] | TensorStore) -> bool | None:
    info = tensors.get(READY)
    if info is None:
        return None
    assert isinstance(tensors, TensorStore)
    if info.dtype != "BOOL" or info.size_bytes != 1:
        raise CheckpointError(
            f"{READY} is not a boolean scalar",
            where=info.path,
            got=f"{info.dtype} {list(info.shape)}",
            expected="BOOL []",
        )
    return next(tensors.read_bytes(READY)) == b"\x01"
