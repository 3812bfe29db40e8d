"""Data flows one way: a layer imports only what stands to its left, and heavy packages only where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dspine_export"

# Left to right; names in one tuple are peers and may not import each other.
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors", "ops_schema", "tolerance", "version"),
    ("recipes",),
    ("checkpoint", "example"),
    ("model",),
    ("capture",),
    ("passes",),
    ("lowering",),
    ("bundle",),
    ("runtime",),
    ("vllm", "triton", "trtllm"),
    ("doctor",),
    ("pipeline",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}
FACADE = "__init__"  # the package's own namespace forwards lazily to the model

TORCH_LAYERS = {
    "checkpoint",
    "example",
    "model",
    "capture",
    "passes",
    "lowering",
    "runtime",
    "vllm",
    "triton",
    "trtllm",
}
HEAVY = {
    "torch": TORCH_LAYERS,
    "onnx": {"passes", "lowering"},
    "onnx_ir": {"passes", "lowering"},
    "onnxscript": {"passes", "lowering"},
    "onnxruntime": {"lowering", "runtime"},
    "tensorrt": {"lowering", "runtime"},
    "tensorrt_rtx": {"lowering", "runtime"},
    "transformers": {"runtime", "vllm"},
    "vllm": {"vllm"},
    "tritonclient": {"triton"},
    "tensorrt_llm": {"trtllm"},
    "pydantic": {"recipes", "checkpoint", "bundle"},
    "rich": {"cli"},
    "typer": {"cli"},
    "gguf": {"example"},
}


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Absolute dotted names imported by one file, relative imports resolved; ``from a import b`` yields ``a.b``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_every_top_level_name_has_a_place() -> None:
    unknown = {layer_of(path) for path in MODULES} - set(RANK) - {FACADE}
    assert not unknown, f"name their place in ORDER: {sorted(unknown)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_left(path: Path) -> None:
    here = layer_of(path)
    if here == FACADE:
        return
    for line, name in imports_of(path):
        if not name.startswith("dspine_export.") or name.startswith("dspine_export.__"):
            assert not name.startswith(("tools.", "tests.")), f"line {line}: the package must not import {name}"
            continue
        there = name.split(".")[1]
        if there == here or there not in RANK:
            continue
        assert RANK[there] < RANK[here], f"line {line}: {here} must not import {there}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_stay_in_their_layer(path: Path) -> None:
    for line, name in imports_of(path):
        allowed = HEAVY.get(name.split(".")[0])
        assert allowed is None or layer_of(path) in allowed, f"line {line}: {name} belongs to {sorted(allowed or ())}"
