"""What `register` does in a process of vLLM: step aside, refuse, or install the alias, the model and the command line options."""

from __future__ import annotations

import functools
import importlib
import logging
from pathlib import Path
from typing import Any, get_args

from dspine_export.errors import DependencyError
from dspine_export.vllm.command_line import extend_command_line
from dspine_export.vllm.engine_arguments import extend_engine_arguments, refuse_dspine
from dspine_export.vllm.older_vllm import reserve_the_anchor
from dspine_export.vllm.serving_config import ARCHITECTURE, METHOD, speculators_config
from dspine_export.vllm.signatures import compare, live_signature
from dspine_export.vllm.snapshots import REPLACED
from dspine_export.vllm.versions import Release, require_release

MODEL = "dspine_export.vllm.draft_model:DSpineDraftModel"
MARK = "_dspine_export"  # on what this module replaced, so that a second call changes nothing

_logger = logging.getLogger("vllm.dspine_export")


def install() -> None:
    """Install everything once per process. Whatever cannot be installed leaves vLLM as it was, and ``dspine`` refused with the reason."""
    vllm = importlib.import_module("vllm")
    engine_args: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    if has_native_method():
        _logger.info("vLLM %s has a 'dspine' method of its own: dspine-export steps aside", vllm.__version__)
        return
    if getattr(engine_args, MARK, False):
        return
    setattr(engine_args, MARK, True)
    try:
        release = require_release(vllm.__version__)
        _require_signatures(engine_args, vllm.__version__)
        _register_model()
        if release.is_older:
            reserve_the_anchor(importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler)
    except Exception as error:  # whatever it is, it must reach the user who asks for dspine, and nobody else
        refuse_dspine(engine_args, str(error))
    else:
        extend_engine_arguments(engine_args, functools.partial(check_hooks, release, vllm.__version__))
    extend_command_line(engine_args)


def has_native_method() -> bool:
    """Whether vLLM itself accepts ``method: dspine``."""
    speculative = importlib.import_module("vllm.config.speculative")
    return METHOD in _flatten(getattr(speculative, "SpeculativeMethod", ()))


def check_hooks(release: Release, version: str) -> None:
    """Compare everything this adapter relies on with the release's signatures; asked once somebody wants ``dspine``.

    Raises:
        DependencyError: hooks that moved, each named.
    """
    package = Path(str(importlib.import_module("vllm").__file__)).parent
    moved = compare(release.hooks, package)
    if moved:
        raise _moved_error(version, [str(entry) for entry in moved])


def _require_signatures(engine_args: Any, version: str) -> None:
    moved = []
    for hook in REPLACED:
        name = hook.name.rpartition(".")[2]
        found = live_signature(getattr(engine_args, name, None))
        if found != hook.signature:
            moved.append(f"{hook.name}{hook.signature}: found {found}")
    if moved:
        raise _moved_error(version, moved)


def _moved_error(version: str, moved: list[str]) -> DependencyError:
    return DependencyError(
        "vLLM's interface is not the one that method 'dspine' was checked against",
        where="; ".join(moved),
        got=f"vLLM {version}",
        fix="install an unmodified checked version of vLLM, or a newer dspine-export; other plugins may have replaced the function",
    )


def _register_model() -> None:
    registry = importlib.import_module("vllm.model_executor.models").ModelRegistry
    algorithms = importlib.import_module("vllm.transformers_utils.configs.speculators.algos")
    registry.register_model(ARCHITECTURE, MODEL)
    algorithms.register_speculator(METHOD)(speculators_config)


def _flatten(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [leaf for part in inner for leaf in _flatten(part)] if inner else [annotation]
