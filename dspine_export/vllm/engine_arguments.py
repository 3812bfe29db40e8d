"""``dspine`` in vLLM's ``EngineArgs``: an alias, resolved and validated where vLLM makes its speculative configuration.

Arguments that do not ask for ``dspine`` pass through untouched.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import DspineError
from dspine_export.vllm import checks
from dspine_export.vllm.requested_drafter import Requested, locate, read_drafter, requested, require_codes
from dspine_export.vllm.self_configuration import take_target_from_drafter
from dspine_export.vllm.serving_config import ARCHITECTURE, HOST_METHOD, apply_keys, serving_keys

_logger = logging.getLogger("vllm.dspine_export")
_NO_V1 = "Model Runner V1 does not support"


def refuse_dspine(engine_args: Any, reason: str) -> None:
    """Wrap ``EngineArgs.create_engine_config``: asking for ``dspine`` raises ValueError with ``reason``."""
    original = getattr(engine_args, "create_engine_config", None)
    if original is None:
        _logger.warning("method 'dspine' is not available: %s", reason)
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _asked(self):
            raise ValueError(f"method 'dspine' is not available: {reason}")
        return original(self, *args, **kwargs)

    engine_args.create_engine_config = create_engine_config


def extend_engine_arguments(engine_args: Any, check_hooks: Callable[[], None]) -> None:
    """Wrap ``create_speculative_config`` and ``create_engine_config`` of ``EngineArgs``.

    Args:
        check_hooks: raises DspineError when this vLLM is not the one that was checked.
    """
    speculative, engine = engine_args.create_speculative_config, engine_args.create_engine_config

    @functools.wraps(speculative)
    def create_speculative_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        asked = _asked(self)
        if asked is None:
            return speculative(self, target_model_config, target_parallel_config)
        with _as_value_error():
            check_hooks()
            keys = _resolve(self, asked, target_model_config, target_parallel_config)
        with _overriding(target_model_config, keys):
            made = speculative(self, target_model_config, target_parallel_config)
        _require_architecture(made)
        return made

    @functools.wraps(engine)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _as_value_error():
            take_target_from_drafter(self)
        try:
            made = engine(self, *args, **kwargs)
        except ValueError as error:
            raise _explained(self, error) from error
        if serves_dspine(made):
            _limit_requests(made)
        return made

    engine_args.create_speculative_config = create_speculative_config
    engine_args.create_engine_config = create_engine_config


def serves_dspine(vllm_config: Any) -> bool:
    """Whether an engine configuration holds a DSpine drafter."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return draft is not None and getattr(draft, "_architecture", None) == ARCHITECTURE


def _resolve(engine_args: Any, asked: Requested, target: Any, parallel: Any) -> dict[str, Any]:
    """Turn the alias into what vLLM understands; returns the keys its parsed drafter configuration must have."""
    checks.check_runner()
    model = locate(asked, engine_args.model)
    config: DrafterConfig = read_drafter(model, asked.options.get("revision"))
    length = checks.draft_length(config, asked.options.get("num_speculative_tokens"))
    checks.check_pair(config, target)
    checks.check_parallelism(config, parallel, asked.options)
    quantisation = checks.quantisation(target, asked.options)
    checks.check_arguments(engine_args, asked.options, length)
    if engine_args.load_format != "dummy":
        require_codes(model)
    engine_args.spec_method = engine_args.spec_model = engine_args.spec_tokens = None
    engine_args.speculative_config = {
        **asked.options,
        "method": HOST_METHOD,
        "model": model,
        "num_speculative_tokens": length,
        "quantization": quantisation,
    }
    _logger.info("dspine: drafter %s, %d tokens a step, for target %s", model, length, engine_args.model)
    return serving_keys(config)


@contextmanager
def _overriding(target: Any, keys: dict[str, Any]) -> Iterator[None]:
    """While it is entered, a configuration that vLLM derives from the target's gets ``keys``.

    vLLM applies a callable ``hf_overrides`` of the target to the drafter's configuration as well; the target's own was parsed before.
    """
    own = target.hf_overrides
    add = functools.partial(apply_keys, keys)
    target.hf_overrides = functools.partial(_both, own, add) if callable(own) else add
    try:
        yield
    finally:
        target.hf_overrides = own


def _both(first: Callable[[Any], Any], second: Callable[[Any], Any], hf_config: Any) -> Any:
    return second(first(hf_config))


def _require_architecture(made: Any) -> None:
    """vLLM passes over an architecture that it cannot import, without a word, and takes the next one."""
    found = getattr(made.draft_model_config, "_architecture", None)
    if found == ARCHITECTURE:
        return
    try:
        importlib.import_module("dspine_export.vllm.draft_model")
        reason = "another plugin may have registered it"
    except Exception as error:  # the reason is all that is wanted
        reason = f"importing it failed: {type(error).__name__}: {error}"
    raise ValueError(f"vLLM would draft with {found} instead of {ARCHITECTURE}: {reason}")


def _limit_requests(vllm_config: Any) -> None:
    length = vllm_config.speculative_config.num_speculative_tokens
    limits = checks.limit_requests(vllm_config, length)
    if limits is not None:
        _logger.warning(
            "dspine: %d rows a request must fit into max_num_batched_tokens=%d: at most %d requests run at a time instead of %d; "
            "raise --max-num-batched-tokens to change that",
            length + 1, vllm_config.scheduler_config.max_num_batched_tokens, limits[1], limits[0],
        )  # fmt: skip


def _asked(engine_args: Any) -> Requested | None:
    with _as_value_error():
        return requested(engine_args)


def _explained(engine_args: Any, error: ValueError) -> ValueError:
    if _NO_V1 not in str(error) or "dspark" not in str(error) or requested(engine_args) is None:
        return error
    return ValueError(
        f"dspine needs vLLM's Model Runner V2, which an option switched off (the warnings above say which): {error}"
    )


@contextmanager
def _as_value_error() -> Iterator[None]:
    """vLLM and its users expect a ValueError for a bad argument."""
    try:
        yield
    except DspineError as error:
        raise ValueError(str(error)) from None
