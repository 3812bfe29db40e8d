"""The float32 twin of a bfloat16 ONNX model: the same graph, node for node, with every bfloat16 turned into float32.

ONNX Runtime's CPU provider has no bfloat16 attention, so the graph that ships is verified through this twin: a rewrite of the very
file, not a second export. Weights are attached anew from a float32 file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx

from dspine_export.checkpoint.safetensors_store import read_header

_HALF, _WIDE = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT


def widen(fused: Path, weights: Path, destination: Path) -> None:
    """Writes the float32 twin of `fused` to `destination`, with initialisers pointing into `weights`, in the same folder."""
    model = onnx.load(str(fused), load_external_data=False)
    placed = read_header(weights)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            info = placed[tensor.name]
            tensor.data_type = _WIDE
            del tensor.external_data[:]
            entries = (("location", weights.name), ("offset", str(info.offset_bytes)), ("length", str(info.size_bytes)))
            tensor.external_data.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in entries)
        elif tensor.data_type == _HALF:
            tensor.CopyFrom(_widened(tensor))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == _HALF:
            value.type.tensor_type.elem_type = _WIDE
    for node in _nodes(model):
        _widen_node(node)
    for function in model.functions:
        del function.value_info[:]
    onnx.save(model, str(destination))


def graph_weights(path: Path) -> list[str]:
    """Names of the initialisers a graph takes from its weights file."""
    model = onnx.load(str(path), load_external_data=False)
    return [t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    yield from model.graph.node
    for function in model.functions:
        yield from function.node


def _widen_node(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i == _HALF:
            attribute.i = _WIDE
        elif attribute.HasField("t") and attribute.t.data_type == _HALF:
            attribute.t.CopyFrom(_widened(attribute.t))


def _widened(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype("float32"), tensor.name)
