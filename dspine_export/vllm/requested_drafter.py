"""Does somebody ask for ``dspine``, and with which drafter? Read from vLLM's arguments before vLLM interprets them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine_export.checkpoint.architectures import DFLASH, DSPINE
from dspine_export.checkpoint.bounded_json import read_json_object
from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.checkpoint.load import CONFIG_FILE
from dspine_export.checkpoint.parse_config import parse_config
from dspine_export.checkpoint.tensor_files import open_directory
from dspine_export.errors import CheckpointError, DspineError, UsageError
from dspine_export.vllm.drafter_lookup import find_drafter, serving_directory
from dspine_export.vllm.serving_config import HOST_METHOD, METHOD
from dspine_export.vllm.weight_names import CODES, TOKEN_TABLE, canonical

_FLAGS = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}


@dataclass(frozen=True)
class Requested:
    """vLLM's speculative options, flags and dictionary merged; ``options["model"]`` is the drafter, None as long as nobody named one."""

    options: dict[str, Any]

    @property
    def model(self) -> str | None:
        return self.options.get("model")


def requested(engine_args: Any) -> Requested | None:
    """The speculative options when they ask for ``dspine``: by name, by the word in the model's place, or by a DSpine drafter's directory.

    Raises:
        UsageError: a flag and the dictionary both set the same option.
    """
    given = getattr(engine_args, "speculative_config", None)
    options = {key.replace("-", "_"): value for key, value in given.items()} if isinstance(given, dict) else {}
    flags = {key: getattr(engine_args, flag, None) for key, flag in _FLAGS.items()}
    flags = {key: value for key, value in flags.items() if value is not None}
    merged = {**options, **flags}
    method, model = merged.get("method"), merged.get("model")
    by_name = METHOD in (method, model)
    if not by_name and not (method in (None, HOST_METHOD) and declares_dspine(model)):
        return None
    twice = sorted(key for key in flags if key in options and options[key] != flags[key])
    if twice:
        raise UsageError(
            "a flag and --speculative-config disagree", got=", ".join(twice), fix="say it in --speculative-config alone"
        )
    if method not in (None, METHOD, HOST_METHOD):
        raise UsageError(
            "a DSpine drafter with another method",
            got=f"method {method}",
            expected=METHOD,
            fix=f'use "method": "{METHOD}"',
        )
    return Requested({**merged, "model": None if model == METHOD else model})


def declares_dspine(model: object) -> bool:
    """Whether ``model`` is a directory whose configuration names a DSpine drafter. Never raises."""
    if not isinstance(model, str) or not model:
        return False
    try:
        names = read_json_object(Path(serving_directory(model)) / CONFIG_FILE).get("architectures")
    except (DspineError, OSError, ValueError):
        return False
    return isinstance(names, list) and DSPINE in names


def locate(request: Requested, target: str) -> str:
    """The drafter's directory or Hugging Face name. Raises UsageError: nobody named one."""
    return serving_directory(request.model or find_drafter(target))


def read_drafter(model: str, revision: str | None = None) -> DrafterConfig:
    """The validated configuration of the drafter.

    Raises:
        CheckpointError: no configuration there, a damaged one, or another kind of drafter.
    """
    where = f"{model}/{CONFIG_FILE}"
    raw = read_json_object(Path(model) / CONFIG_FILE) if Path(model).is_dir() else _remote_config(model, revision)
    declared = raw.get("architectures") or []
    if DSPINE not in declared and raw.get("dspine_config") is None:
        fix = '"method": "dflash" serves a DFlash drafter' if DFLASH in declared else "pass a DSpine drafter"
        if "config" in raw or not declared:
            fix = "dspine-export build --target vllm writes a drafter directory from the reference layout"
        raise CheckpointError(
            "not a DSpine drafter", where=where, got=f"architectures {declared}", expected=f'["{DSPINE}"]', fix=fix
        )
    return parse_config(raw, where, {}, False, [])


def require_codes(model: str) -> None:
    """Refuse a local drafter whose transfer codes would have to be recomputed: a server does not do that.

    Raises:
        CheckpointError: neither codes nor a folded table, or damaged files.
    """
    if not Path(model).is_dir():
        return
    names = {canonical(name) for name in open_directory(Path(model))}
    if not names & {CODES, TOKEN_TABLE}:
        raise CheckpointError(
            "the drafter stores no transfer_codes",
            where=model,
            expected=f"{CODES}, or {TOKEN_TABLE} in a directory built for vLLM",
            fix=f"dspine-export build {model} --target-model TARGET --target vllm -o OUT, then serve with OUT",
        )


def _remote_config(model: str, revision: str | None) -> dict[str, Any]:
    from transformers import PretrainedConfig

    try:
        return dict(PretrainedConfig.get_config_dict(model, revision=revision)[0])
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "the drafter's configuration cannot be read",
            where=model,
            got=str(error).partition("\n")[0],
            expected="a drafter directory, or a Hugging Face name that can be reached",
        ) from None
