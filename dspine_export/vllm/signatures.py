"""Comparison of vLLM's hooks with the signatures they had when they were read.

vLLM's sources are parsed, not imported: the hooks of its workers load GPU code, and the question is asked in a process that must not.
What this adapter replaces at run time is looked at live as well, because another plugin may have replaced it before.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Hook:
    """One function of vLLM that is called, replaced or implemented here.

    Attributes:
        name: ``module:Qualified.name`` below ``vllm``.
        signature: parameter names in order; ``=`` marks a default, ``*`` what follows as keyword-only.
    """

    name: str
    signature: str


@dataclass(frozen=True)
class Moved:
    """A hook that is not where, or not as, the snapshot says."""

    hook: Hook
    found: str

    def __str__(self) -> str:
        return f"{self.hook.name}{self.hook.signature}: found {self.found}"


def compare(hooks: Iterable[Hook], package: Path) -> list[Moved]:
    """Every hook that differs in the sources below ``package``, vLLM's own folder."""
    trees: dict[str, ast.Module | str] = {}
    moved = []
    for hook in hooks:
        module, _, qualified = hook.name.partition(":")
        if module not in trees:
            trees[module] = _parse(package, module)
        tree = trees[module]
        found = tree if isinstance(tree, str) else _find(tree, qualified.split("."))
        if found != hook.signature:
            moved.append(Moved(hook, found))
    return moved


def live_signature(function: Any) -> str:
    """The notation of `Hook.signature` for a function that is loaded; what was wrapped around it counts, not what it wraps."""
    try:
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return "no function"
    words: list[str] = []
    kinds: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not any(word.startswith("*") for word in words):
            words.append("*")
        stars = kinds.get(parameter.kind, "")
        words.append(stars + parameter.name + ("" if parameter.default is parameter.empty else "="))
    return f"({', '.join(words)})"


def _parse(package: Path, module: str) -> ast.Module | str:
    stem = package.joinpath(*module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            try:
                return ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError) as error:
                return f"an unreadable module ({error})"
    return "no module"


def _find(tree: ast.Module, path: list[str]) -> str:
    body: list[ast.stmt] = tree.body
    for depth, name in enumerate(path):
        node = next((node for node in body if getattr(node, "name", None) == name), None)
        if isinstance(node, ast.ClassDef):
            body = node.body
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and depth == len(path) - 1:
            return _signature(node.args)
        else:
            return "nothing"
    return "a class"


def _signature(arguments: ast.arguments) -> str:
    positional = [*arguments.posonlyargs, *arguments.args]
    plain = len(positional) - len(arguments.defaults)
    words = [argument.arg + ("=" if index >= plain else "") for index, argument in enumerate(positional)]
    if arguments.vararg or arguments.kwonlyargs:
        words.append(f"*{arguments.vararg.arg}" if arguments.vararg else "*")
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    words += [argument.arg + ("" if default is None else "=") for argument, default in defaults]
    if arguments.kwarg:
        words.append(f"**{arguments.kwarg.arg}")
    return f"({', '.join(words)})"
