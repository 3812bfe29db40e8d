"""Finding and reading recipes: by the name of a shipped one, or by the path of a YAML file."""

from __future__ import annotations

import difflib
import importlib.resources
from collections.abc import Hashable, Sequence
from contextlib import suppress
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from dspine_export.errors import UsageError
from dspine_export.recipes.schema import Recipe

_SUFFIX = ".yaml"
_LIMIT_BYTES = 64 << 10


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML takes the last of two equal keys without a word; a recipe must not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


def list_recipes() -> tuple[Recipe, ...]:
    """Every shipped recipe, by name."""
    return tuple(_parse(path.read_text(encoding="utf-8"), path.name) for path in _shipped())


def recipe_text(name: str) -> str:
    """A recipe's YAML as written, comments included. Raises UsageError for an unknown name."""
    return _find(name).read_text(encoding="utf-8")


def load_recipe(name: str) -> Recipe:
    """The shipped recipe called ``name``, or the one in the YAML file ``name``.

    Raises:
        UsageError: there is no such recipe, or it is not valid.
    """
    try:
        text = recipe_text(name)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the recipe cannot be read", where=name, got=error, expected="YAML in UTF-8") from error
    return _parse(text, name)


def recipe_error(error: ValidationError, where: str) -> UsageError:
    """One of pydantic's problems in our terms: an unknown key before all others, with the nearest known one."""
    problems = error.errors()
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return UsageError(
            "unknown recipe key", where=where, got=key, fix=suggestion(first["loc"][-1], first["loc"][:-1])
        )
    got = first["input"]
    message = first["msg"].removeprefix("Value error, ")
    shown = None if isinstance(got, dict) else repr(got)
    return UsageError(
        "the recipe has an unusable value", where=f"{where}: {key}" if key else where, got=shown, expected=message
    )


def suggestion(key: object, parents: Sequence[object]) -> str:
    """The advice for an unknown ``key`` under ``parents``."""
    model: Any = Recipe
    for parent in parents:
        model = model.model_fields[str(parent)].annotation
    known = sorted(getattr(model, "model_fields", {}))
    close = difflib.get_close_matches(str(key), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known) or 'nothing below this key'}"


def _shipped() -> list[Traversable]:
    folder = importlib.resources.files("dspine_recipes")
    return sorted((entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)), key=lambda entry: entry.name)


def _find(name: str) -> Traversable:
    shipped = {path.name.removesuffix(_SUFFIX): path for path in _shipped()}
    if name in shipped:
        return shipped[name]
    path = Path(name)
    with suppress(OSError):  # such as a name longer than any file's
        if path.is_file() and path.stat().st_size <= _LIMIT_BYTES:
            return path
    close = difflib.get_close_matches(name, shipped, n=1)
    raise UsageError(
        "no such recipe",
        got=name[:200],
        expected=f"a YAML file of at most {_LIMIT_BYTES >> 10} KiB, or one of {', '.join(shipped)}",
        fix=f"did you mean {close[0]!r}?" if close else None,
    )


def _parse(text: str, where: str) -> Recipe:
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError("the recipe is not valid YAML", where=where, got=" ".join(str(error).split())) from error
    if not isinstance(document, dict):
        raise UsageError(
            "the recipe is not a mapping", where=where, got=type(document).__name__, expected="key: value lines"
        )
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise recipe_error(error, where) from error
