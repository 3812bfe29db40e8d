"""Recipes: the shipped ones are right, wrong ones are refused with the key and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dspine_export.errors import UsageError
from dspine_export.recipes import Recipe, apply_overrides, list_recipes, load_recipe, recipe_text
from dspine_export.recipes.memory import DrafterShape, estimate_memory

NAMES = ("qwen3-4b", "qwen3-8b", "smollm2-135m")
QWEN = {"vocab_size": 151936, "num_layers": 5, "num_taps": 5, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SHAPES = {
    "smollm2-135m": DrafterShape(
        hidden_size=576,
        vocab_size=49152,
        num_layers=4,
        num_taps=5,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=768,
        rank=256,
        message_size=128,
    ),
    "qwen3-4b": DrafterShape(hidden_size=2560, intermediate_size=9728, rank=1024, message_size=512, **QWEN),
    "qwen3-8b": DrafterShape(hidden_size=4096, intermediate_size=12288, rank=1024, message_size=512, **QWEN),
}


def test_shipped_recipes_by_name() -> None:
    assert tuple(recipe.name for recipe in list_recipes()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_header_is_the_exact_command(name: str) -> None:
    header = recipe_text(name).splitlines()[0]
    assert re.fullmatch(rf"# dspine-export build \S+ --target-model \S+ --recipe {name} -o \S+", header)


@pytest.mark.parametrize("name", SHAPES)
def test_memory_estimate(name: str) -> None:
    recipe = load_recipe(name)
    estimate = estimate_memory(SHAPES[name], recipe.profile, recipe.build.dtype)
    assert recipe.memory is not None
    assert recipe.memory.plans_gb == pytest.approx(estimate.plans / 1e9, abs=0.01)
    assert recipe.memory.builder_peak_gb == pytest.approx(estimate.builder_peak / 1e9, abs=0.01)
    assert recipe.memory.cache_gb == pytest.approx(estimate.cache / 1e9, abs=0.01)


def test_estimate_agrees_with_measured_plans() -> None:
    """Plans of this shape were built once: 2.3 GB and 0.25 GB."""
    estimate = estimate_memory(SHAPES["qwen3-8b"], Recipe().profile, "bfloat16")
    assert estimate.draft_plan / 1e9 == pytest.approx(2.3, abs=0.05)
    assert estimate.context_plan / 1e9 == pytest.approx(0.25, abs=0.005)


BROKEN = {
    "name: [": "not valid YAML",
    "- a": "not a mapping",
    "name: a\nname: b": "occurs twice",
    "profle: {}": "did you mean 'profile'",
    "profile: {batch: {min: 1, opt: 1, maxx: 2}}": "did you mean 'max'",
    "profile: {batch: {min: 4, opt: 2, max: 8}}": "min <= opt <= max",
    "profile: {batch: {min: 0, opt: 1, max: 1}}": "greater than or equal to 1",
    "profile: {batch: {min: 1, opt: 1, max: 1.5}}": "valid integer",
    "profile: {context: {min: 1, opt: 1, max: 16}}": "more than context.max",
    "build: {dtype: float16}": "float16 overflows",
    "build: {target: tpu}": "'trtllm', 'onnx' or 'vllm'",
    "build: {dtype: 3}": "'bfloat16' or 'float32'",
    "&a [*a]": "not a mapping",
}


@pytest.mark.parametrize("text", BROKEN)
def test_broken_recipe(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(BROKEN[text])) as caught:
        load_recipe(str(path))
    assert "mine.yaml" in str(caught.value)


def test_unknown_name_is_suggested() -> None:
    with pytest.raises(UsageError, match="did you mean 'qwen3-8b'"):
        load_recipe("qwen3_8b")


@pytest.mark.parametrize(
    ("assignment", "read"),
    [
        ("profile.batch.max=16", lambda recipe: recipe.profile.batch.max == 16),
        ("build.dtype=fp32", lambda recipe: recipe.build.dtype == "float32"),
        ("build.compute_capability=8.9", lambda recipe: recipe.build.compute_capability == "8.9"),
        ("verification.cases=[[2, 5]]", lambda recipe: recipe.verification.cases == ((2, 5),)),
        ("profile.batch={min: 1, opt: 2, max: 4}", lambda recipe: recipe.profile.batch.opt == 2),
    ],
)
def test_override(assignment: str, read: Callable[[Recipe], bool]) -> None:
    assert read(apply_overrides(Recipe(), [assignment]))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("profile.batch.maxx=2", "did you mean 'max'"),
        ("profil.batch.max=2", "did you mean 'profile'"),
        ("profile.batch.max.more=2", "nothing below this key"),
        ("profile.batch.max", "not an assignment"),
        ("=2", "not an assignment"),
        ("profile.batch.max=many", "valid integer"),
        ("profile.batch.min=9", "min <= opt <= max"),
        ("profile.batch.max=[", "not valid YAML"),
    ],
)
def test_bad_override(assignment: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        apply_overrides(Recipe(), [assignment])


def test_size_options_pull_the_other_points_down() -> None:
    recipe = apply_overrides(Recipe(), max_batch_size=1, max_seq_len=512)
    assert (recipe.profile.batch.opt, recipe.profile.batch.max) == (1, 1)
    assert (recipe.profile.context.opt, recipe.profile.context.max, recipe.profile.tokens.max) == (512, 512, 512)
    assert apply_overrides(Recipe(), max_seq_len=32768).profile.tokens.max == Recipe().profile.tokens.max
    with pytest.raises(UsageError, match="positive"):
        apply_overrides(Recipe(), max_batch_size=0)
