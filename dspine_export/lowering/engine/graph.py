"""An ONNX graph made ready for a TensorRT parser.

Two things differ between what ONNX Runtime executes and what the builder needs:

* the function bodies of our operators must go: given both, the parser inlines the body and never asks for the plugin;
* a float32 ``Attention`` node needs ``TRT_decomposable = 1``, for no fused kernel exists in that precision. The attribute is unknown to
  ONNX's own checker, so it is set here, on the copy that only the parser sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspine_export.errors import BuildError
from dspine_export.lowering.engine.profile import InputProfile, ProfileSpec, input_profiles
from dspine_export.lowering.engine.weights import ExternalWeight, external_weights, weight_bytes
from dspine_export.ops_schema import DOMAIN

if TYPE_CHECKING:
    import onnx

ENTRIES = ("context", "draft")
_DECOMPOSABLE = "TRT_decomposable"


@dataclass(frozen=True)
class EngineGraph:
    """One entry point, ready to parse.

    Attributes:
        entry: ``context`` or ``draft``.
        path: the .onnx file it came from.
        proto: the serialised model, without function bodies and without external data.
        weights: its external initialisers, checked.
        weight_bytes: bytes of all initialisers, the estimate of the plan.
        plugin_nodes: (operator, node name) of every ``dspine`` node.
        profiles: shapes of the runtime inputs.
        fused_attention: attention nodes left to a fused kernel, those in half precision.
    """

    entry: str
    path: Path
    proto: bytes
    weights: tuple[ExternalWeight, ...]
    weight_bytes: int
    plugin_nodes: tuple[tuple[str, str], ...]
    profiles: tuple[InputProfile, ...]
    fused_attention: int = 0

    @property
    def head_size(self) -> int | None:
        """Size of an attention head as the cache input says it; None for a graph without one."""
        return next((shapes.max[-1] for shapes in self.profiles if shapes.name == "keys"), None)


def load_graph(path: Path, spec: ProfileSpec) -> EngineGraph:
    """Read, check and rewrite one .onnx file; weights stay on disk.

    Raises:
        BuildError: not an ONNX file, damaged external weights, or a dimension the profile does not determine.
        UsageError: a wrong profile.
    """
    model = _read(path)
    weights = external_weights(model, path.parent)
    nodes = tuple((node.op_type, node.name) for node in _nodes(model.graph) if node.domain == DOMAIN)
    profiles = input_profiles(model, spec, where=path.name)
    size = weight_bytes(model)
    mark_decomposable_attention(model)
    strip_operator_bodies(model)
    fused = sum(node.op_type == "Attention" and not _is_decomposable(node) for node in _nodes(model.graph))
    return EngineGraph(path.stem, path, model.SerializeToString(), weights, size, nodes, profiles, fused)


def strip_operator_bodies(model: onnx.ModelProto) -> int:
    """Remove the function bodies of our operators in place; the number removed."""
    kept = [function for function in model.functions if function.domain != DOMAIN]
    removed = len(model.functions) - len(kept)
    del model.functions[:]
    model.functions.extend(kept)
    return removed


def mark_decomposable_attention(model: onnx.ModelProto) -> int:
    """Set ``TRT_decomposable = 1`` in place on float32 ``Attention`` nodes that lack it; the number of nodes changed."""
    import onnx

    pending = [
        node
        for node in _nodes(model.graph)
        if (node.domain, node.op_type) == ("", "Attention") and not _is_decomposable(node)
    ]
    if not pending:
        return 0
    types = _element_types(model)
    if any(node.input[0] not in types for node in pending):
        types = _element_types(onnx.shape_inference.infer_shapes(model))
    changed = [node for node in pending if types.get(node.input[0]) == onnx.TensorProto.FLOAT]
    for node in changed:
        node.attribute.append(onnx.helper.make_attribute(_DECOMPOSABLE, 1))
    return len(changed)


def _is_decomposable(node: onnx.NodeProto) -> bool:
    return any(attribute.name == _DECOMPOSABLE for attribute in node.attribute)


def _element_types(model: onnx.ModelProto) -> dict[str, int]:
    graph = model.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values if value.type.tensor_type.elem_type}
    return types | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)


def _read(path: Path) -> onnx.ModelProto:
    import onnx

    if not path.is_file():
        raise BuildError(
            "an ONNX graph is missing", where=path, fix="export again, or point at the folder that holds it"
        )
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's DecodeError; its package is not ours to depend on
        raise BuildError("the file is not an ONNX model", where=path, got=str(error), fix="export again") from error
    if not model.graph.node:
        raise BuildError("the ONNX model is empty", where=path, fix="export again")
    return model
