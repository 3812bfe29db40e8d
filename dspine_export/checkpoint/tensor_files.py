"""Which safetensors files make up a checkpoint directory: a single file, or shards named by an index. Pickles are refused."""

from __future__ import annotations

from pathlib import Path

from dspine_export.checkpoint.bounded_json import read_json_object
from dspine_export.checkpoint.safetensors_store import TensorStore
from dspine_export.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CODES_FILE = "transfer.safetensors"
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_MAX_INDEX_BYTES = 64 * 1024 * 1024


def require_directory(path: Path) -> None:
    """Refuse anything but a checkpoint directory, saying what to pass instead."""
    if path.is_file():
        if path.suffix in _PICKLE_SUFFIXES:
            raise _pickle_error(path)
        raise CheckpointError(
            "Checkpoint is not a directory", where=path, fix=f"pass the directory that holds config.json: {path.parent}"
        )
    if not path.is_dir():
        raise CheckpointError("Checkpoint directory not found", where=path, fix="check the path")


def open_directory(path: Path) -> TensorStore:
    """Open all model tensors of the directory `path` (not the reference layout's separate codes file)."""
    if (path / SINGLE_FILE).exists():
        return TensorStore.from_files([path / SINGLE_FILE])
    if (path / INDEX_FILE).exists():
        return _open_shards(path)
    present = sorted(file.name for file in path.iterdir() if file.suffix == ".safetensors" and file.name != CODES_FILE)
    if len(present) == 1 and "-of-" not in present[0]:
        return TensorStore.from_files([path / present[0]])
    if present:
        raise CheckpointError(
            "Several safetensors files and no index",
            where=path,
            got=", ".join(present[:5]),
            expected=f"{SINGLE_FILE} or {INDEX_FILE}",
        )
    pickles = sorted(file for file in path.iterdir() if file.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise _pickle_error(pickles[0])
    raise CheckpointError(
        "No weights in the checkpoint directory",
        where=path,
        expected=f"{SINGLE_FILE} or {INDEX_FILE}",
        fix="pass the drafter's own directory; in a bundle that is OUT/drafter",
    )


def _pickle_error(path: Path) -> CheckpointError:
    return CheckpointError(
        "Pickle checkpoints are refused: loading one runs code from the file",
        where=path,
        expected="safetensors",
        fix="in a sandbox you trust: safetensors.torch.save_file(torch.load(PATH, weights_only=True), 'model.safetensors')",
    )


def _open_shards(path: Path) -> TensorStore:
    index_path = path / INDEX_FILE
    weight_map = read_json_object(index_path, _MAX_INDEX_BYTES).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise CheckpointError("Index has no weight_map", where=index_path, expected='{"weight_map": {tensor: file}}')
    for file_name in sorted(set(weight_map.values())):
        _check_shard_name(index_path, file_name)
    store = TensorStore.from_files([path / name for name in sorted(set(weight_map.values()))])
    for name, file_name in weight_map.items():
        if name not in store or store[name].path.name != file_name:
            raise CheckpointError(
                f"Tensor {ascii(name)[:200]} is not in the shard the index names", where=index_path, got=file_name
            )
    unlisted = sorted(set(store) - set(weight_map))
    if unlisted:
        raise CheckpointError(
            "Shards hold tensors the index does not list", where=index_path, got=", ".join(unlisted[:5])
        )
    return store


def _check_shard_name(index_path: Path, name: str) -> None:
    # Only plain names: a link inside the directory (as download caches use) is the user's own, a path in the index is not.
    if not name.endswith(".safetensors") or name != Path(name).name or "\\" in name or not name.isprintable():
        raise CheckpointError(
            "Index points outside its own directory or at a wrong kind of file",
            where=index_path,
            got=ascii(name)[:200],
            expected="a plain *.safetensors file name",
        )
