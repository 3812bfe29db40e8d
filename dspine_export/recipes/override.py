"""``--set a.b=c`` and the size options: changes to a recipe, validated like the file itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml
from pydantic import ValidationError

from dspine_export.errors import UsageError
from dspine_export.recipes.load import recipe_error, suggestion
from dspine_export.recipes.schema import Recipe


def apply_overrides(
    recipe: Recipe,
    assignments: Iterable[str] = (),
    *,
    target: str | None = None,
    dtype: str | None = None,
    max_batch_size: int | None = None,
    max_seq_len: int | None = None,
) -> Recipe:
    """A recipe with named options applied first and ``key=value`` assignments after them, checked as a whole.

    ``max_batch_size`` and ``max_seq_len`` set ``profile.batch.max`` and ``profile.context.max`` and pull the smaller points, and the rows
    appended per call, down with them.

    Raises:
        UsageError: unknown key (with the nearest known one), unusable value, or ranges that contradict each other.
    """
    document = recipe.model_dump()
    for key, value in (("target", target), ("dtype", dtype)):
        if value is not None:
            document["build"][key] = value
    _limit(document["profile"]["batch"], max_batch_size, "--max-batch-size")
    _limit(document["profile"]["context"], max_seq_len, "--max-seq-len")
    if max_seq_len is not None:
        _limit(document["profile"]["tokens"], min(max_seq_len, document["profile"]["tokens"]["max"]), "--max-seq-len")
    for assignment in assignments:
        _assign(document, assignment)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise recipe_error(error, f"recipe {recipe.name} with the given options") from error


def _limit(values: dict[str, Any], maximum: int | None, option: str) -> None:
    if maximum is None:
        return
    if maximum < 1:
        raise UsageError("a size must be positive", where=option, got=maximum, expected="1 or more")
    values.update(max=maximum, opt=min(values["opt"], maximum), min=min(values["min"], maximum))


def _assign(document: dict[str, Any], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    *parents, leaf = key.strip().split(".")
    if not equals or not leaf:
        raise UsageError(
            "not an assignment", where="--set", got=assignment, expected="key=value, such as profile.batch.max=16"
        )
    node: Any = document
    for depth, part in enumerate((*parents, leaf)):
        if not isinstance(node, dict) or part not in node:
            raise UsageError("unknown recipe key", where="--set", got=key, fix=suggestion(part, parents[:depth]))
        if depth < len(parents):
            node = node[part]
    try:
        node[leaf] = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError("the value is not valid YAML", where=f"--set {key}", got=text[:200]) from error
