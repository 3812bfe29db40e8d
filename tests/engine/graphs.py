"""Stand-in graphs for the engine tests: the two entry points' interfaces around a few small layers, weights outside the .onnx file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h

from dspine_export.lowering.engine import ProfileSpec, Range

TAPS, HIDDEN, RANK, MESSAGE, BLOCK, CANDIDATES, VOCAB = 2, 64, 32, 16, 8, 4, 256
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SPEC = ProfileSpec(batch=Range(1, 2, 4), context=Range(1, 64, 256), tokens=Range(1, 8, 64))
DTYPES = {"float32": T.FLOAT, "bfloat16": T.BFLOAT16}

Weights = dict[str, tuple[int, ...]]


def save(
    path: Path, nodes, inputs, outputs, weights: Weights, data: Path, *, dtype: str = "float32", functions=()
) -> dict[str, bytes]:
    """Write ``path`` with all weights in ``data`` (relative to its folder); returns each weight's bytes, all of them unique."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / data).parent.mkdir(parents=True, exist_ok=True)
    element = DTYPES[dtype]
    tensors, contents, offset = [], {}, 128
    generator = np.random.default_rng(sum(path.name.encode()))
    with (path.parent / data).open("wb") as file:
        file.write(b"\0" * offset)
        for name, shape in weights.items():
            values = generator.standard_normal(shape).astype(np.float32) * 0.1
            raw = values.tobytes() if dtype == "float32" else (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
            tensor = T(name=name, data_type=element, dims=shape, data_location=T.EXTERNAL)
            for key, value in (("location", data), ("offset", offset), ("length", len(raw))):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
            contents[name] = raw
            file.write(raw)
            offset += len(raw)
    graph = h.make_graph(nodes, path.stem, inputs, outputs, tensors)
    opsets = [h.make_opsetid("", 23), h.make_opsetid("dspine", 1)]
    onnx.save(h.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=11), path)
    return contents


def value(name: str, element: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return h.make_tensor_value_info(name, element, list(shape))


def context_graph(path: Path, *, dtype: str = "float32", data: Path = Path("context.bin")) -> dict[str, bytes]:
    """target_hidden [batch, tokens, A*d] -> new_keys [batch, tokens, d]: one projection and one norm."""
    element = DTYPES[dtype]
    nodes = [
        h.make_node("MatMul", ["target_hidden", "fc"], ["projected"], name="fc_node"),
        h.make_node("RMSNormalization", ["projected", "norm"], ["new_keys"], name="norm_node", axis=-1),
    ]
    inputs = [value("target_hidden", element, ["batch", "tokens", TAPS * HIDDEN])]
    outputs = [value("new_keys", element, ["batch", "tokens", HIDDEN])]
    return save(path, nodes, inputs, outputs, {"fc": (TAPS * HIDDEN, HIDDEN), "norm": (HIDDEN,)}, data, dtype=dtype)


def draft_graph(path: Path, *, dtype: str = "float32", data: Path = Path("draft.bin")) -> dict[str, bytes]:
    """Attention of a block over the cache, without any DSpine operator. Scale 1: the builder folds any other into the weights."""
    element = DTYPES[dtype]
    nodes = [
        h.make_node("MatMul", ["block", "query"], ["q"], name="query_node"),
        h.make_node("Attention", ["q", "keys", "values"], ["mixed"], name="attention_node", scale=1.0),
        h.make_node("MatMul", ["mixed", "out"], ["hidden"], name="out_node"),
    ]
    inputs = [
        value("block", element, ["batch", HEADS, BLOCK, HEAD_DIM]),
        value("keys", element, ["batch", KV_HEADS, "context", HEAD_DIM]),
        value("values", element, ["batch", KV_HEADS, "context", HEAD_DIM]),
    ]
    outputs = [value("hidden", element, ["batch", HEADS, BLOCK, HEAD_DIM])]
    return save(
        path, nodes, inputs, outputs, {"query": (HEAD_DIM, HEAD_DIM), "out": (HEAD_DIM, HEAD_DIM)}, data, dtype=dtype
    )


def operator_graph(
    path: Path, *, dtype: str = "float32", bodies: bool = False, data: Path = Path("draft.bin")
) -> dict[str, bytes]:
    """All three DSpine operators in their order, with or without (token) function bodies."""
    element = DTYPES[dtype]
    slots = BLOCK - 1
    nodes = [
        h.make_node(
            "AdjacentInjection",
            [
                "hidden",
                "feature",
                "anchor_message",
                "message_weight",
                "receiver_weight",
                "predecessor_weight",
                "bias",
                "write",
            ],
            ["injected"],
            name="injection_0",
            domain="dspine",
        ),
        h.make_node("Slice", ["hidden", "one", "end", "one"], ["pre"], name="slice_node"),
        h.make_node(
            "TransitionScores",
            ["pre", "receiver_gate", "anchor_ids", "candidate_ids", "token_table", "write", "norm", "lm_head"],
            ["transition_scores"],
            name="transition",
            domain="dspine",
            eps=1e-6,
        ),
        h.make_node(
            "LatticeWalk",
            ["transition_scores", "candidate_ids", "temperature", "uniforms"],
            ["tokens", "q"],
            name="walk",
            domain="dspine",
        ),
    ]
    for name, number in (("one", 1), ("end", BLOCK)):
        nodes.insert(0, h.make_node("Constant", [], [name], value=h.make_tensor(name, T.INT64, [1], [number])))
    inputs = [
        value("hidden", element, ["batch", BLOCK, HIDDEN]),
        value("feature", element, ["batch", BLOCK, RANK]),
        value("anchor_message", element, ["batch", 2 * MESSAGE]),
        value("receiver_gate", element, ["batch", slots, MESSAGE]),
        value("anchor_ids", T.INT64, ["batch"]),
        value("candidate_ids", T.INT64, ["batch", slots, CANDIDATES]),
        value("temperature", T.FLOAT, ["batch"]),
        value("uniforms", T.FLOAT, ["batch", slots]),
        value("lm_head", element, [VOCAB, HIDDEN]),
    ]
    outputs = [
        value("injected", element, ["batch", BLOCK, HIDDEN]),
        value("transition_scores", T.FLOAT, ["batch", slots, CANDIDATES, CANDIDATES]),
        value("tokens", T.INT64, ["batch", slots]),
        value("q", T.FLOAT, ["batch", slots, CANDIDATES]),
    ]
    weights: Weights = {
        "message_weight": (MESSAGE, RANK),
        "receiver_weight": (MESSAGE, RANK),
        "predecessor_weight": (MESSAGE, RANK),
        "bias": (MESSAGE,),
        "write": (HIDDEN, MESSAGE),
        "norm": (HIDDEN,),
        "token_table": (VOCAB, 2 * MESSAGE),
    }
    functions = [walk_body()] if bodies else []
    return save(path, nodes, inputs, outputs, weights, data, dtype=dtype, functions=functions)


def walk_body() -> onnx.FunctionProto:
    """A body with LatticeWalk's interface (not its maths): enough for the parser to prefer it over a plugin."""
    nodes = [
        h.make_node("ArgMax", ["transition_scores"], ["best"], axis=-1, keepdims=0),
        h.make_node("ReduceMax", ["best"], ["tokens"], keepdims=0),
        h.make_node("Softmax", ["transition_scores"], ["rows"]),
        h.make_node("Identity", ["rows"], ["q"]),
    ]
    operands = ["transition_scores", "candidate_ids", "temperature", "uniforms"]
    return h.make_function("dspine", "LatticeWalk", operands, ["tokens", "q"], nodes, [h.make_opsetid("", 23)], [])
