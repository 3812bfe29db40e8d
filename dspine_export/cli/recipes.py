"""``dspine-export recipes``: list the shipped recipes, or show one."""

from __future__ import annotations

from typing import Annotated

import typer

from dspine_export.cli.guard import command


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Show this recipe: a shipped one or a YAML file.", show_default="list all")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> None:
    """List the shipped build recipes, or show one as it is written."""
    with command(as_json=as_json) as console:
        from dspine_export.recipes import list_recipes, load_recipe, recipe_text

        if name is not None:
            recipe = load_recipe(name)
            console.result({"recipe": recipe.model_dump()}, recipe_text(name).splitlines())
            return
        known = list_recipes()
        width = max(len(recipe.name) for recipe in known)
        lines = [f"{recipe.name:<{width}}  {recipe.build.dtype:<8}  {recipe.description}" for recipe in known]
        console.result({"recipes": [recipe.model_dump() for recipe in known]}, lines)
