"""``vllm serve OUT``: the drafter directory in the model's place names its target, and the two change places.

vLLM does this itself for targets that are Hugging Face names. From 0.33 on it refuses directories, because a downloaded configuration could
point anywhere; here they are taken, from a directory the user named, and never together with code from the model's repository.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspine_export.checkpoint.bounded_json import read_json_object
from dspine_export.checkpoint.load import CONFIG_FILE
from dspine_export.errors import DspineError, UsageError
from dspine_export.vllm.drafter_lookup import SERVING_FOLDER, serving_directory
from dspine_export.vllm.serving_config import METHOD


def take_target_from_drafter(engine_args: Any) -> None:
    """Exchange a drafter directory for its target; every other model stays.

    Raises:
        UsageError: the target it names is not on this machine, or remote code is trusted.
    """
    if not isinstance(engine_args.model, str):
        return
    drafter = serving_directory(engine_args.model, (SERVING_FOLDER,))
    target = named_target(Path(drafter))
    if target is None:
        return
    if not Path(target).is_absolute():
        engine_args.model = drafter
        return
    _check_target(engine_args, drafter, target)
    given = engine_args.speculative_config if isinstance(engine_args.speculative_config, dict) else {}
    engine_args.speculative_config = {**given, "method": METHOD, "model": drafter}
    if engine_args.tokenizer in (None, engine_args.model):
        engine_args.tokenizer = target
    engine_args.model = target


def named_target(directory: Path) -> str | None:
    """The target that a drafter directory built for vLLM names; None for any other place. Never raises."""
    try:
        document = read_json_object(directory / CONFIG_FILE)
        target = document["speculators_config"]["verifier"]["name_or_path"]
    except (DspineError, OSError, ValueError, KeyError, TypeError):
        return None
    return target if document.get("speculators_model_type") == METHOD and isinstance(target, str) else None


def _check_target(engine_args: Any, drafter: str, target: str) -> None:
    options = json.dumps({"method": METHOD, "model": drafter})
    explicit = f"vllm serve TARGET --speculative-config '{options}'"
    if not Path(target).is_dir():
        raise UsageError(
            "the target this drafter names is not on this machine",
            where=drafter,
            got=target,
            fix=f"name it: {explicit}",
        )
    if getattr(engine_args, "trust_remote_code", False):
        raise UsageError(
            "a drafter's configuration may not choose the directory that code is run from",
            got=f"--trust-remote-code with {target}",
            fix=f"name the target: {explicit} --trust-remote-code",
        )
