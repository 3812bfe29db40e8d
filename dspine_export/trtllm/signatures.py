"""Signature snapshots: the hooks of TensorRT-LLM this adapter relies on, as read in its sources, and their comparison with a package.

A snapshot holds facts (names and parameter lists), each with the repository, commit and path it was read at.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

PACKAGE = "tensorrt_llm"


@dataclass(frozen=True)
class Source:
    """Where facts were read: a public repository and one commit at which the file has the content read, or a documentation page."""

    repository: str
    path: str
    commit: str | None = None


@dataclass(frozen=True)
class Hook:
    """One hook.

    Attributes:
        name: ``module:Qualified.name`` below ``tensorrt_llm``.
        signature: parameters with defaults as Python writes them, without annotations; for ``fields`` the names that must exist.
        kind: ``function``, ``fields`` (of a pydantic class) or ``member`` (of an enumeration).
        side: ``called`` by us or ``implemented`` by us for TensorRT-LLM to call.
        source: where it was read.
    """

    name: str
    signature: str
    source: Source
    kind: Literal["function", "fields", "member"] = "function"
    side: Literal["called", "implemented"] = "implemented"


@dataclass(frozen=True)
class Snapshot:
    """The hooks of one release line, from pre-release ``first_candidate`` on (the first whose documentation shows the feature)."""

    release: str
    first_candidate: int
    hooks: tuple[Hook, ...]


@dataclass(frozen=True)
class Moved:
    """A hook that is not where, or not as, the snapshot says."""

    hook: Hook
    found: str

    def __str__(self) -> str:
        return f"{self.hook.name}: expected {self.hook.signature}, found {self.found}"


def compare(snapshot: Snapshot) -> list[Moved]:
    """Every hook of the installed package that differs from ``snapshot``. Imports the modules the hooks live in."""
    moved = []
    for hook in snapshot.hooks:
        found = describe(hook)
        if not _agrees(hook, found):
            moved.append(Moved(hook, found))
    return moved


def describe(hook: Hook) -> str:
    """What the installed package has in a hook's place, in the snapshot's notation, or why there is nothing."""
    module_name, _, qualified = hook.name.partition(":")
    try:
        place: Any = importlib.import_module(f"{PACKAGE}.{module_name}")
    except Exception as error:  # a package that needs a GPU fails in many ways
        return f"no module ({type(error).__name__}: {error})"
    for part in qualified.split("."):
        if not hasattr(place, part):
            return "nothing"
        place = inspect.getattr_static(place, part) if not isinstance(place, ModuleType) else getattr(place, part)
    if hook.kind == "fields":
        return ", ".join(getattr(place, "model_fields", {}))
    if hook.kind == "member":
        return qualified
    return plain_signature(place)


def plain_signature(function: Any) -> str:
    """Parameter names, kinds and defaults without annotations: ``(self, layer_id, hidden_states, residual=None)``."""
    target: Any = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return "not a function"
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return f"property {text}" if isinstance(function, property) else text


def _agrees(hook: Hook, found: str) -> bool:
    if hook.kind == "fields":
        return set(hook.signature.split(", ")) <= set(found.split(", "))
    return found == hook.signature
