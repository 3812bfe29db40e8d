"""Build recipes: one YAML file per target model, validated strictly, every value overridable with ``--set``."""

from dspine_export.recipes.load import list_recipes, load_recipe, recipe_text
from dspine_export.recipes.override import apply_overrides
from dspine_export.recipes.schema import BuildSettings, DimRange, Profile, Recipe, Verification

__all__ = [
    "BuildSettings",
    "DimRange",
    "Profile",
    "Recipe",
    "Verification",
    "apply_overrides",
    "list_recipes",
    "load_recipe",
    "recipe_text",
]
