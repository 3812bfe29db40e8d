"""``OUT/trtllm``: what a TensorRT-LLM user points ``trtllm-serve`` at. Generated files hold configuration only, no code to maintain.

OUT/trtllm/__init__.py                            so that the folder itself can be given to --custom_module_dirs
OUT/trtllm/dspine_trtllm/__init__.py              constants, and one call into dspine_export.trtllm
OUT/trtllm/config.yaml                            for --config of trtllm-serve, and for llmapi
OUT/trtllm/triton/tensorrt_llm/1/model.yaml       for Triton's llmapi model
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dspine_export.errors import UsageError
from dspine_export.trtllm.settings import PACKAGE_NAME, ExecutorName
from dspine_export.version import __version__

FOLDER = "trtllm"
CONFIG_NAME, MODEL_YAML = "config.yaml", Path("triton/tensorrt_llm/1/model.yaml")
_UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)  # no text, no such date, nested too deeply
KV_CACHE_FRACTION = 0.8  # TensorRT-LLM fills this share first; the drafter's context cache comes on top of it
_ABSENT = "absent"
_UNRUN = "Checked against TensorRT-LLM's signatures, never run inside the real package."


@dataclass(frozen=True)
class ServingOptions:
    """What the files say.

    Attributes:
        output: the bundle's final place; TensorRT-LLM takes the drafter's path from the configuration.
        target_model: the target's directory or name, for Triton's file.
        block_size: B of the drafter.
        mask_token_id, target_layer_ids: of the drafter.
        max_batch_size, max_seq_len: limits of the server.
        executor: ``torch`` or ``plan``.
        attention_backend: which context cache TensorRT-LLM keeps, ``VANILLA`` or ``TRTLLM``.
        allow_unchecked: run with TensorRT-LLM versions that were not signature-checked.
    """

    output: Path
    target_model: str
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    max_batch_size: int
    max_seq_len: int
    executor: ExecutorName = "torch"
    attention_backend: str = "VANILLA"
    allow_unchecked: bool = False


def write_files(staging: Path, options: ServingOptions, *, keep: Collection[Path] = ()) -> None:
    """Write ``staging/trtllm``, replacing an older one file by file (never in place: they may be hard links).

    Args:
        keep: files to leave as they are, of `editable_files`.
    """
    folder = staging / FOLDER
    own = options.output / FOLDER
    words = ("trtllm-serve", options.target_model, "--custom_module_dirs", own, "--config", own / CONFIG_NAME)
    serve = shlex.join(map(str, words))
    files = {
        folder
        / "__init__.py": f'"""Registers the drafter beside this file. {_made()}"""\n\nfrom . import {PACKAGE_NAME} as {PACKAGE_NAME}\n',
        folder / PACKAGE_NAME / "__init__.py": _package(options),
        folder / CONFIG_NAME: _comment(f"{serve}\n{_UNRUN}\nAfter moving the bundle, change speculative_model.")
        + _dump(serving_config(options)),
        folder / MODEL_YAML: _comment(_TRITON_NOTE.format(output=shlex.quote(str(own)), unrun=_UNRUN))
        + _dump(triton_config(options)),
    }
    for path, text in files.items():
        if path in keep:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")


def editable_files(folder: Path, options: ServingOptions) -> dict[Path, dict[str, Any]]:
    """The files of ``folder/trtllm`` that are the operator's to change, and what `write_files` would write into each."""
    own = folder / FOLDER
    return {own / CONFIG_NAME: serving_config(options), own / MODEL_YAML: triton_config(options)}


def describe_edits(path: Path, generated: dict[str, Any]) -> str:
    """In which options an edited file differs from what would be generated: ``max_seq_len 64 (generated: 96)``; for messages."""
    try:
        text = path.read_text(encoding="utf-8")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            return "it has aliases, which may unfold to any size and are not compared"
        found = _leaves(yaml.safe_load(text))
    except (OSError, *_UNREADABLE):
        return "it is not readable YAML"
    wanted = _leaves(generated)
    names = [name for name in {**wanted, **found} if found.get(name, _ABSENT) != wanted.get(name, _ABSENT)]
    shown = [f"{name} {found.get(name, _ABSENT)} (generated: {wanted.get(name, _ABSENT)})" for name in names]
    return ", ".join(shown) or "comments only"


def _leaves(document: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(document, dict):
        return {prefix: document}
    pairs = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in document.items())
    return {name: leaf for key, value in pairs for name, leaf in _leaves(value, key).items()}


def serving_config(options: ServingOptions) -> dict[str, Any]:
    """The document of ``config.yaml``."""
    return {
        "speculative_config": speculative_config(options),
        "max_batch_size": options.max_batch_size,
        "max_seq_len": options.max_seq_len,
        "kv_cache_config": {"free_gpu_memory_fraction": KV_CACHE_FRACTION},
    }


def speculative_config(options: ServingOptions) -> dict[str, Any]:
    """TensorRT-LLM's ``speculative_config``.

    ``block_size`` counts drafted tokens there and must equal ``max_draft_len``; left out, TensorRT-LLM takes the checkpoint's B, which
    counts the anchor too, and refuses it.
    """
    drafted = options.block_size - 1
    return {
        "decoding_type": "DSpark",
        "speculative_model": str(options.output / "drafter"),
        "max_draft_len": drafted,
        "block_size": drafted,
        "mask_token_id": options.mask_token_id,
        "target_layer_ids": list(options.target_layer_ids),
        "attention_backend": options.attention_backend,
    }


def triton_config(options: ServingOptions) -> dict[str, Any]:
    """The document of Triton's ``model.yaml``: arguments of ``LLM`` and Triton's own."""
    return {
        "model": options.target_model,
        "backend": "pytorch",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        **serving_config(options),
        "triton_config": {"max_batch_size": 0, "decoupled": True},
    }


def read_target_model(folder: Path) -> str | None:
    """The target an older ``OUT/trtllm`` was written for; None where there is none.

    Raises:
        UsageError: the file is there and not readable.
    """
    path = folder / FOLDER / MODEL_YAML
    if not path.is_file():
        return None
    try:
        model = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
        if not isinstance(model, str):
            raise TypeError(f"model is no path: {type(model).__name__}")
        return model
    except (KeyError, TypeError, *_UNREADABLE) as error:
        raise UsageError(
            "this model.yaml cannot be read, and the target's place is taken from it",
            where=path,
            got=" ".join(str(error).split()),
            fix="repair it, or delete it and resume to have it written anew",
        ) from error


def misplaced_drafter(bundle: Path) -> str | None:
    """The drafter named by the bundle's ``config.yaml`` when it is not the bundle's, whose copy may lie elsewhere: for a moved bundle."""
    try:
        document = yaml.safe_load((bundle / FOLDER / CONFIG_NAME).read_text(encoding="utf-8"))
        named = document["speculative_config"]["speculative_model"]
    except (OSError, KeyError, TypeError, *_UNREADABLE):
        return None
    if not isinstance(named, str):
        return None  # the operator's own file; TensorRT-LLM reads it and complains itself
    try:
        own = (bundle / "drafter" / "config.json").read_bytes()
        return None if (Path(named) / "config.json").read_bytes() == own else named
    except OSError:
        return named


def _package(options: ServingOptions) -> str:
    settings = {
        "bundle": "../..",
        "executor": options.executor,
        "max_draft_len": options.block_size - 1,
        "allow_unchecked": options.allow_unchecked,
    }
    lines = "".join(f"    {name!r}: {value!r},\n".replace("'", '"') for name, value in settings.items())
    return (
        f'"""DSpine drafter for TensorRT-LLM: configuration of this bundle. {_made()}"""\n\n'
        f"from dspine_export.trtllm import register\n\nSETTINGS = {{\n{lines}}}\n\nregister(SETTINGS, __file__)\n"
    )


def _made() -> str:
    return f"Generated by dspine-export {__version__}."


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())


def _dump(document: dict[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None)


_TRITON_NOTE = """Goes into NVIDIA's llmapi model (all_models/llmapi/tensorrt_llm) in place of its 1/model.yaml.
Start the server with PYTHONPATH={output} and let 1/model.py `import dspine_trtllm` before it makes the LLM:
this file has no key that imports a module. {unrun}"""
