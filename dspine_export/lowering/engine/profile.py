"""From the user's ranges to one optimisation profile per graph, checked before the builder sees it.

Builders accept inconsistent profiles silently and fail far from the cause, so all of it is decided here: ``min <= opt <= max`` for the
user's three ranges, and for every input the algebra of its symbolic dimensions (``context + 16``), evaluated from those ranges alone.
Two inputs that share a symbol can therefore never disagree.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from dspine_export.errors import BuildError, UsageError

if TYPE_CHECKING:
    import onnx

POINTS = ("min", "opt", "max")
_MAX_DIMENSION = 2**31 - 1

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Range:
    """The sizes one dynamic dimension may take; kernels are chosen for ``opt``."""

    min: int
    opt: int
    max: int

    def check(self, name: str) -> None:
        """Raises UsageError unless 1 <= min <= opt <= max < 2^31."""
        for point in POINTS:
            value = getattr(self, point)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_DIMENSION:
                raise UsageError(
                    "a profile size is out of range", where=f"{name}.{point}", got=value, expected="1 .. 2147483647"
                )
        if not self.min <= self.opt <= self.max:
            raise UsageError(
                "a profile range is not ordered",
                where=name,
                got=f"min {self.min}, opt {self.opt}, max {self.max}",
                expected="min <= opt <= max",
            )


@dataclass(frozen=True)
class ProfileSpec:
    """Dynamic sizes of both plans.

    Attributes:
        batch: sequences per call.
        context: columns of the K/V cache (its capacity; shorter contexts are masked).
        tokens: context rows appended per call of the context plan.
    """

    batch: Range = Range(1, 1, 8)
    context: Range = Range(1, 1024, 4096)
    tokens: Range = Range(1, 16, 1024)

    def check(self) -> None:
        """Raises UsageError for a range out of order, or rows that could not fit the cache they are appended to."""
        for name in ("batch", "context", "tokens"):
            getattr(self, name).check(name)
        if self.tokens.max > self.context.max:
            raise UsageError(
                "more tokens would be appended at once than the context can hold",
                where="tokens.max",
                got=self.tokens.max,
                expected=f"<= context.max ({self.context.max})",
            )

    def symbols(self, point: str) -> dict[str, int]:
        """Value of each symbolic dimension at ``min``, ``opt`` or ``max``."""
        return {name: int(getattr(getattr(self, name), point)) for name in ("batch", "context", "tokens")}

    def to_json(self) -> dict[str, dict[str, int]]:
        return {name: asdict(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class InputProfile:
    """Shapes of one graph input at the three points."""

    name: str
    min: Shape
    opt: Shape
    max: Shape

    @property
    def dynamic(self) -> bool:
        return self.min != self.max


def input_profiles(model: onnx.ModelProto, spec: ProfileSpec, where: object = None) -> tuple[InputProfile, ...]:
    """The profile of every runtime input of ``model``.

    Raises:
        UsageError: ``spec`` itself is wrong.
        BuildError: the graph has a dimension that ``spec`` does not determine, or an expression that falls as its symbol grows.
    """
    spec.check()
    initializers = {tensor.name for tensor in model.graph.initializer}
    return tuple(_input_profile(value, spec, where) for value in model.graph.input if value.name not in initializers)


def _input_profile(value: onnx.ValueInfoProto, spec: ProfileSpec, where: object) -> InputProfile:
    shapes: dict[str, list[int]] = {point: [] for point in POINTS}
    for axis, dim in enumerate(value.type.tensor_type.shape.dim):
        place = f"{where or 'graph'}: input '{value.name}', axis {axis}"
        if dim.HasField("dim_value"):
            sizes = [dim.dim_value] * 3
        else:
            sizes = [evaluate_dimension(dim.dim_param, spec.symbols(point), place) for point in POINTS]
        if not 0 < sizes[0] <= sizes[1] <= sizes[2] <= _MAX_DIMENSION:
            raise BuildError(
                "a dimension of the graph has no valid range under this profile",
                where=place,
                got=f"{dim.dim_param or dim.dim_value} -> min {sizes[0]}, opt {sizes[1]}, max {sizes[2]}",
                expected="1 <= min <= opt <= max",
            )
        for point, size in zip(POINTS, sizes, strict=True):
            shapes[point].append(size)
    return InputProfile(value.name, *(tuple(shapes[point]) for point in POINTS))


_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def evaluate_dimension(expression: str, symbols: Mapping[str, int], where: object = None) -> int:
    """Value of a symbolic dimension such as ``context + 16``: integers, known symbols, ``+ - * //`` and parentheses.

    Raises:
        BuildError: an unnamed dimension, an unknown symbol or any other syntax.
    """
    try:
        return _evaluate(ast.parse(expression, mode="eval").body, symbols)
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError) as error:
        raise BuildError(
            "a dynamic dimension of the graph is not determined by the profile",
            where=where,
            got=repr(expression),
            expected=f"an expression of {', '.join(sorted(symbols))}",
        ) from error


def _evaluate(node: ast.AST, symbols: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return symbols[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left, symbols), _evaluate(node.right, symbols))
    raise ValueError("unsupported expression")
