"""The four sources of training prompts. Each yields plain user messages."""

from __future__ import annotations

import ast
import itertools
import random
import string
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.training.prompts import read_prompts

DATA = Path(__file__).resolve().parent.parent / "data"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SOLUTION = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```"

# Long grids and mazes teach a 135M model nothing but noise.
SKIPPED_TASKS = {
    "arc_1d", "arc_agi", "boxnet", "circuit_logic", "codeio", "composite", "emoji_mystery", "figlet_font", "knight_swap",
    "mahjong_puzzle", "maze", "path_star", "rearc", "rectangle_count", "rubiks_cube", "rush_hour", "sokoban", "sudoku", "tsumego",
}  # fmt: skip
PACKAGES = ("numpy", "networkx", "sympy", "torch", "transformers", "pandas", "rich", "hypothesis", "typer", "onnx", "safetensors")


def grade_school_math(rng: random.Random) -> Iterator[str]:
    """GSM8K train questions, most of them with the suffix that asks for a boxed answer."""
    for row in read_prompts(DATA / "gsm8k_train.jsonl"):
        question = row["turns"][0]
        yield question + BOXED if rng.random() < 0.8 else question


def reasoning_gym(rng: random.Random, per_task: int) -> Iterator[str]:
    """Problems of every suitable reasoning-gym task."""
    import reasoning_gym as gym
    from reasoning_gym.factory import DATASETS

    for task in sorted(set(DATASETS) - SKIPPED_TASKS):
        for item in gym.create_dataset(task, size=per_task, seed=rng.randrange(1 << 30)):
            question = item["question"].strip()
            if len(question) <= 1200:
                yield question + BOXED if rng.random() < 0.5 else question


def _functions(path: Path) -> Iterator[tuple[str, str]]:
    """(signature with docstring, first sentence) of the public functions of one source file."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or node.name.startswith("test"):
            continue
        text = ast.get_docstring(node)
        names = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
        if not text or not 40 <= len(text) <= 700 or not text.isascii() or len(names) > 5 or '"""' in text or "\\" in text:
            continue
        body = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
        sentence = " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")
        if len(sentence) < 12:
            continue
        yield f'\ndef {node.name}({", ".join(names)}):\n    """{body.strip()}\n    """\n', sentence


def function_writing(rng: random.Random, count: int) -> Iterator[str]:
    """Tasks made from docstrings: half as code to complete, half as one sentence."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    site = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    roots += [folder / name for folder in site for name in PACKAGES]
    files = [f for root in roots if root.is_dir() for f in sorted(root.rglob("*.py"))]
    files = [f for f in files if not {"test", "tests", "site-packages"} & set(f.relative_to(f.anchor).parts[5:]) or "numpy" in f.parts]
    rng.shuffle(files)
    seen: set[str] = set()
    for path in files:
        for number, (code, sentence) in enumerate(_functions(path)):
            if sentence in seen or number >= 12:
                continue
            seen.add(sentence)
            if len(seen) > count:
                return
            words = sentence[0].lower() + sentence[1:]
            if rng.random() < 0.5:
                yield SOLUTION.format(code=code)
            elif len(words) <= 200 and words.split()[0].isalpha():
                verb = words.split()[0]
                start = "Write a function that " if verb.endswith("s") else "Write a python function to "
                yield f"{start}{words}."


def chat(rng: random.Random, per_template: int) -> Iterator[str]:
    """The project's own chat templates with their slots filled at random."""
    raw: dict[str, Any] = yaml.safe_load((DATA / "chat_templates.yaml").read_text(encoding="utf-8"))
    slots = raw["slots"]
    for template in raw["templates"]:
        names = sorted({name for _, name, _, _ in string.Formatter().parse(template) if name})
        combinations = list(itertools.islice(itertools.product(*(slots[name] for name in names)), 200_000))
        for values in rng.sample(combinations, min(per_template, len(combinations))):
            text = template.format(**dict(zip(names, values, strict=True)))
            numeric = {"n", "m", "p"} & set(names) and not {"topic", "dish"} & set(names)
            yield text + BOXED if numeric and rng.random() < 0.5 else text
