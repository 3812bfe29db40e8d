"""What the ONNX files hold: valid, self-contained, weights outside and in the right place, nothing of the machine that made them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
import torch

from dspine_export.checkpoint.safetensors_header import read_header
from dspine_export.lowering.operators import translation_table
from dspine_export.ops_schema import DOMAIN, OPS, VERSION, OpSchema
from dspine_export.passes.fold_tables import CODES, MESSAGE, PREDECESSOR_GATE, TOKEN_TABLE
from tests.lowering.conftest import Exported

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Nothing that TensorRT's parsers refuse or that hides a computation from them.
UNWANTED = re.compile("Sequence|CastLike|Loop|Scan|^If$|Optional|String")


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(str(path), load_external_data=False)


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    yield from model.graph.node
    for function in model.functions:
        yield from function.node


def external(model: onnx.ModelProto) -> dict[str, dict[str, str]]:
    return {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }


@pytest.fixture(params=["onnx/context", "onnx/draft", "portable/context", "portable/draft", "portable/draft.fused"])
def path(request: pytest.FixtureRequest, exported: Exported) -> Path:
    return exported.folder / f"{request.param}.onnx"


def test_checker(path: Path) -> None:
    translation_table()  # registers our operators' schemas
    onnx.checker.check_model(str(path), full_check=False)
    model = load(path)
    assert model.ir_version == 11 and model.producer_name == "dspine-export"
    assert {o.domain: o.version for o in model.opset_import}[""] == 23


def test_operators(path: Path) -> None:
    model = load(path)
    kinds = Counter(node.op_type for node in all_nodes(model))
    assert not [kind for kind in kinds if UNWANTED.search(kind)]
    ours = Counter(node.op_type for node in model.graph.node if node.domain == DOMAIN)
    fused = path.stem.startswith("draft") and (path.parent.name == "onnx" or "fused" in path.name)
    assert ours == ({"AdjacentInjection": 3, "TransitionScores": 1, "LatticeWalk": 1} if fused else {})
    domains = {node.domain for node in all_nodes(model)}
    assert domains <= {"", DOMAIN}


def test_function_bodies(path: Path) -> None:
    """Every operator of ours that is used has a body, of the domain's version and without attributes baked in."""
    model = load(path)
    used = {node.op_type for node in model.graph.node if node.domain == DOMAIN}
    assert {f.name for f in model.functions if f.domain == DOMAIN} == used
    assert len(model.functions) == len(used)
    if used:
        assert {o.domain: o.version for o in model.opset_import}[DOMAIN] == VERSION
    schemas = {schema.op_type: schema for schema in OPS}
    for function in model.functions:
        schema = schemas[function.name]
        assert len(function.input) == len(schema.inputs)
        assert list(function.output) == [operand.name for operand in schema.outputs]
        assert tuple(function.attribute) == schema.attributes
        referred = {a.ref_attr_name for node in function.node for a in node.attribute if a.ref_attr_name}
        assert referred == set(schema.attributes)


def test_no_float64(path: Path) -> None:
    model = load(path)
    assert all(tensor.data_type != onnx.TensorProto.DOUBLE for tensor in model.graph.initializer)
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        assert value.type.tensor_type.elem_type != onnx.TensorProto.DOUBLE
    for node in all_nodes(model):
        for attribute in node.attribute:
            assert not (node.op_type == "Cast" and attribute.name == "to" and attribute.i == onnx.TensorProto.DOUBLE)
            assert not (attribute.HasField("t") and attribute.t.data_type == onnx.TensorProto.DOUBLE)


def test_bfloat16_only_where_it_belongs(path: Path) -> None:
    model = load(path)
    half = any(t.data_type == onnx.TensorProto.BFLOAT16 for t in model.graph.initializer)
    assert half == (path.parent.name == "onnx")


def test_every_weight_is_external_and_in_place(exported: Exported, path: Path) -> None:
    """Marker test: the bytes an initialiser points at are the checkpoint tensor's, converted."""
    model, tensors = load(path), exported.checkpoint.tensors
    placed, data = external(model), (path.parent / "weights.safetensors").read_bytes()
    assert placed
    dtype = torch.bfloat16 if path.parent.name == "onnx" else torch.float32
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, entry in placed.items():
        assert entry["location"] == "weights.safetensors"
        raw = data[int(entry["offset"]) : int(entry["offset"]) + int(entry["length"])]
        got = torch.frombuffer(bytearray(raw), dtype=dtype).view(list(stored[name].dims))
        if name != TOKEN_TABLE:
            assert torch.equal(got, tensors.read(name).to(dtype)), name
    # Whatever is inside the file is a constant of the graph, not a weight.
    inline = [tensor for tensor in model.graph.initializer if tensor.name not in placed]
    assert all(name not in tensors for name in (tensor.name for tensor in inline))
    assert sum(len(tensor.raw_data) for tensor in inline) < 4096


def test_weights_of_the_checkpoint_are_all_different(exported: Exported) -> None:
    """Otherwise the marker test would prove nothing."""
    tensors = [exported.checkpoint.tensors.read(name) for name in exported.checkpoint.tensors]
    bytes_seen = {bytes(t.contiguous().view(-1).view(torch.uint8).numpy()) for t in tensors if t.ndim}
    assert len(bytes_seen) == sum(t.ndim > 0 for t in tensors)


@pytest.mark.parametrize(("folder", "dtype"), [("onnx", "bfloat16"), ("portable", "float32")])
def test_token_table(exported: Exported, folder: str, dtype: str) -> None:
    """The fold, against float64, within one rounding of the stored type."""
    tensors = exported.checkpoint.tensors
    codes = tensors.read(CODES).double()
    weights = torch.cat([tensors.read(name).double() for name in (MESSAGE, PREDECESSOR_GATE)])
    want = codes.shape[1] ** 0.5 * codes @ weights.T
    path = exported.folder / folder / "weights.safetensors"
    info = read_header(path)[TOKEN_TABLE]
    raw = path.read_bytes()[info.offset_bytes : info.offset_bytes + info.size_bytes]
    got = torch.frombuffer(bytearray(raw), dtype=TYPES[dtype]).view(info.shape).double()
    unit = torch.finfo(TYPES[dtype]).eps
    assert bool(((got - want).abs() <= unit * want.abs() + 1e-6).all())


def test_codes_do_not_ship_twice(exported: Exported) -> None:
    """The table replaces the codes in the fused graph; the portable one, which folds nothing, has them."""
    assert CODES not in external(load(exported.folder / "onnx" / "draft.onnx"))
    assert CODES not in read_header(exported.folder / "onnx" / "weights.safetensors")
    assert CODES in external(load(exported.folder / "portable" / "draft.onnx"))


def test_inputs_outputs_and_their_dimensions(path: Path) -> None:
    model = load(path)

    def described(values: object) -> dict[str, list[object]]:
        return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}  # type: ignore[attr-defined]

    inputs, outputs = described(model.graph.input), described(model.graph.output)
    if path.stem.startswith("context"):
        assert inputs == {"target_hidden": ["batch", "tokens", 192], "start_positions": ["batch"]}
        assert outputs == {name: ["batch", 3, 2, "tokens", 16] for name in ("new_keys", "new_values")}
        return
    cache = ["batch", 3, 2, "context", 16]
    assert (inputs["keys"], inputs["values"]) == (cache, cache)
    assert inputs["anchor_ids"] == inputs["context_lengths"] == inputs["temperature"] == ["batch"]
    assert inputs["uniforms"] == ["batch", 7] and inputs["lm_head"] == [320, 64]
    assert list(outputs) == ["tokens", "candidate_ids", "transition_scores", "q", "unrefined_tokens"]
    assert outputs["transition_scores"] == ["batch", 7, 8, 8]


def test_sums_of_dimensions_are_kept(exported: Exported) -> None:
    """Keys of context and block: the builder's profile is derived from `context + 8`."""
    model = load(exported.folder / "onnx" / "draft.onnx")
    names = {d.dim_param for v in model.graph.value_info for d in v.type.tensor_type.shape.dim if d.dim_param}
    assert "context + 8" in names
    words = {word for name in names for word in re.findall(r"[A-Za-z_]\w*", name)}
    assert words <= {"batch", "context", "tokens"}


def test_nothing_of_the_machine(path: Path) -> None:
    """No source files, stack traces or directories: a file is the same wherever it was made."""
    raw = path.read_bytes()
    for leak in (
        b".py",
        b"stack_trace",
        b"pkg.torch",
        b"/site-packages",
        os.fsencode(Path.cwd()),
        os.fsencode(path.parents[2]),
    ):
        assert leak not in raw, leak
    model = load(path)
    assert not model.doc_string and not model.graph.doc_string and not model.metadata_props
    for node in all_nodes(model):
        assert not node.doc_string
        assert {p.key for p in node.metadata_props} <= {"dspine.trt_decomposable"}


def test_float32_attention_may_be_decomposed(path: Path) -> None:
    attention = [node for node in load(path).graph.node if node.op_type == "Attention"]
    assert len(attention) == (3 if path.stem.startswith("draft") else 0)
    if path.name == "draft.onnx":
        marked = [any(p.key == "dspine.trt_decomposable" for p in node.metadata_props) for node in attention]
        assert marked == [path.parent.name == "portable"] * 3


def test_exporting_again_gives_the_same_bytes(smallest: Exported, tmp_path: Path) -> None:
    """In another process, directory and hash seed."""
    script = (
        "import sys; from pathlib import Path\n"
        "from dspine_export.checkpoint.load import open_checkpoint\n"
        "from dspine_export.lowering import export_onnx\n"
        "export_onnx(open_checkpoint(Path(sys.argv[1])), None, Path(sys.argv[2]), dtype='float32', form='fused')\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", script, str(smallest.checkpoint.path), str(tmp_path / "again")]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path, capture_output=True)
    for name in ("context.onnx", "draft.onnx", "weights.safetensors"):
        assert (smallest.folder / "onnx" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


@pytest.mark.parametrize("schema", OPS, ids=lambda schema: schema.op_type)
def test_one_schema_everywhere(schema: OpSchema) -> None:
    """ONNX's registry, torch's registry and the C++ header say what `ops_schema` says."""
    from dspine_plugins.schema_header import HEADER_PATH

    from dspine_export.passes.torch_ops import overload

    translation_table()
    registered = onnx.defs.get_schema(schema.op_type, VERSION, DOMAIN)
    assert registered.since_version == VERSION
    operands = (*schema.inputs, *schema.outputs)
    kinds = {"T": "T", "float32": "tensor(float)", "int64": "tensor(int64)"}
    formal = [(p.name, p.type_str) for p in (*registered.inputs, *registered.outputs)]
    assert formal == [(o.name, kinds[o.dtype]) for o in operands]
    assert tuple(registered.attributes) == schema.attributes
    arguments = [argument.name for argument in overload(schema)._schema.arguments]
    assert arguments == [*(o.name for o in schema.inputs), *schema.attributes]
    rules = {"T": "Compute", "float32": "Float32", "int64": "Int64"}
    for suffix, declared in (("Inputs", schema.inputs), ("Outputs", schema.outputs)):
        table = re.search(rf"k{schema.op_type}{suffix}\[\] = \{{(.*?)\n\}};", HEADER_PATH.read_text(), re.DOTALL)
        assert table is not None
        found = re.findall(r'\{"(\w+)", ElementRule::k(\w+), (\d)', table[1])
        assert found == [(o.name, rules[o.dtype], str(len(o.shape))) for o in declared]
