"""Checkpoint -> ONNX files of one form: capture, passes, translation, external weights, checks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx
import onnx_ir as ir
import torch

from dspine_export.capture.entries import ENTRIES, EntryContract
from dspine_export.capture.trace import trace_entries
from dspine_export.checkpoint.load import Checkpoint
from dspine_export.checkpoint.target import TargetInfo
from dspine_export.errors import BuildError
from dspine_export.lowering.exporter import export_to_ir, rename_dimensions
from dspine_export.lowering.operators import attach_function_bodies, translation_table
from dspine_export.lowering.weights import PlacedTensor, write_weights
from dspine_export.ops_schema import ADJACENT_INJECTION, DOMAIN, LATTICE_WALK, TRANSITION_SCORES
from dspine_export.passes.pipeline import Form, apply_passes
from dspine_export.passes.program import Program, to_exported
from dspine_export.version import __version__

WEIGHTS_FILE = "weights.safetensors"
IR_VERSION = 11
DECOMPOSABLE = "dspine.trt_decomposable"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_onnx(
    checkpoint: Checkpoint,
    target: TargetInfo | None,
    out_dir: Path,
    *,
    dtype: str,
    form: Form,
    entries: tuple[str, ...] = ENTRIES,
    extra_weights: Iterable[str] = (),
) -> list[Path]:
    """Writes an ONNX file per entry point and ``weights.safetensors`` into `out_dir`.

    Args:
        target: needed only where transfer codes must be recomputed from its head.
        dtype: compute type, "float32" or "bfloat16".
        form: "fused" (our operators as nodes, with function bodies) or "portable" (standard operators only).
        entries: which entry points to write.
        extra_weights: tensors to store besides those the graphs read.

    Returns:
        the written paths, ONNX files first.

    Raises:
        BuildError: a stage failed; CheckpointError: transfer codes cannot be recomputed.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    compute = DTYPES[dtype]
    programs = {
        name: apply_passes(traced, form) for name, traced in trace_entries(checkpoint.config, compute, entries).items()
    }
    if form == "fused" and "draft" in programs:
        check_fused(programs["draft"])
    names = {weight for program in programs.values() for weight in program.weights.values()}.union(extra_weights)
    placed = write_weights(checkpoint, target, names, out_dir / WEIGHTS_FILE, compute)
    paths = []
    for name, program in programs.items():
        path = out_dir / f"{name}.onnx"
        write_entry(program, placed, path)
        paths.append(path)
    return [*paths, out_dir / WEIGHTS_FILE]


def check_fused(program: Program) -> None:
    """Every layer's injection and the transition must have become operators: a pattern that stopped matching is a build failure.

    Raises:
        BuildError: naming the operator and the counts.
    """
    if program.config.transfer is None:
        return
    targets = [str(node.target) for node in program.graph.nodes]
    expected = {ADJACENT_INJECTION: program.config.num_layers, TRANSITION_SCORES: 1, LATTICE_WALK: 1}
    for schema, count in expected.items():
        found = targets.count(f"{DOMAIN}.{schema.torch_name}.default")
        if found != count:
            raise BuildError(
                "Fusion did not find the operator", where=f"{DOMAIN}::{schema.op_type}", got=found, expected=count
            )


def write_entry(program: Program, placed: dict[str, PlacedTensor], path: Path) -> None:
    """Translates one program and writes it with initialisers that point into the weights file.

    Raises:
        BuildError: translation failed or the written model does not pass onnx.checker.
    """
    contract = program.contract
    model = export_to_ir(to_exported(program), [spec.name for spec in contract.outputs], translation_table())
    _name_dimensions(model, contract)
    for name, value in model.graph.initializers.items():
        if value.const_value is None:
            value.const_value = _external(name, placed[name])
    attach_function_bodies(model, program.config, program.dtype)
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "dspine-export", __version__
    model.graph.name = contract.name
    if program.decomposable_attention:
        _allow_decomposition(model)
    ir.save(model, path)
    _check(path, contract)


def _external(name: str, tensor: PlacedTensor) -> ir.ExternalTensor:
    dtype = ir.DataType.BFLOAT16 if tensor.dtype == torch.bfloat16 else ir.DataType.FLOAT
    return ir.ExternalTensor(
        tensor.file, tensor.offset_bytes, tensor.size_bytes, dtype, shape=ir.Shape(tensor.shape), name=name, base_dir=""
    )


def _name_dimensions(model: ir.Model, contract: EntryContract) -> None:
    names = {}
    for value, spec in zip(model.graph.inputs, contract.inputs, strict=True):
        for dim, wanted in zip(value.shape or (), spec.shape, strict=True):
            if isinstance(dim, ir.SymbolicDim) and isinstance(wanted, str) and dim.value is not None:
                names[dim.value] = wanted
    rename_dimensions(model, names)


def _allow_decomposition(model: ir.Model) -> None:
    """Recorded as metadata: TensorRT wants a node attribute that ONNX Runtime and onnx.checker refuse, so the engine builder sets it."""
    for node in model.graph:
        if node.op_type == "Attention":
            node.metadata_props[DECOMPOSABLE] = "1"


def _check(path: Path, contract: EntryContract) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=False)
    except onnx.checker.ValidationError as error:
        raise BuildError("The exported ONNX model is not valid", where=path.name, got=str(error)[:2000]) from error
    model = onnx.load(str(path), load_external_data=False)
    for kind, specs, values in (
        ("inputs", contract.inputs, model.graph.input),
        ("outputs", contract.outputs, model.graph.output),
    ):
        names, expected = [value.name for value in values], [spec.name for spec in specs]
        if names != expected:
            raise BuildError(
                "The exported ONNX model lost its contract", where=f"{path.name} {kind}", got=names, expected=expected
            )
