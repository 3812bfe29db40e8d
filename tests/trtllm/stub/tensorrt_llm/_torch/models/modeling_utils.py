"""Stub of the draft-model registry: registrations from outside the package win over built-in ones, whatever the order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_BUILDERS: dict[Any, Callable[..., Any]] = {}


def register_draft_model(mode: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def bind(builder: Callable[..., Any]) -> Callable[..., Any]:
        own = builder.__module__.startswith("tensorrt_llm.")
        if not (own and mode in _BUILDERS):
            _BUILDERS[mode] = builder
        return builder

    return bind


def get_registered_draft_model_builder(mode: Any) -> Callable[..., Any] | None:
    from . import modeling_dspark  # noqa: F401  (built-in models register late)

    return _BUILDERS.get(mode)
