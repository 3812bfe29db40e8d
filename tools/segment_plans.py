"""Plans of a draft graph for fixed sizes: of the segments between our operators, or of the whole portable graph."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import onnx

from dspine_export.checkpoint.load import Checkpoint
from dspine_export.lowering.engine import ProfileSpec, Range
from dspine_export.lowering.engine.backend import Backend
from dspine_export.lowering.engine.build import build_one
from dspine_export.lowering.engine.graph import load_graph
from dspine_export.lowering.engine.profile import evaluate_dimension
from dspine_export.lowering.engine.target import resolve_target
from dspine_export.lowering.onnx_export import DTYPES, WEIGHTS_FILE, export_onnx
from dspine_export.lowering.segments import OperatorCall, cut
from dspine_export.lowering.weights import write_weights
from dspine_export.passes.pipeline import Form

FORMS: tuple[Form, ...] = ("fused", "portable")


@dataclass(frozen=True)
class Plan:
    """A plan file, the number of nodes it was built from, and the seconds that took."""

    path: Path
    nodes: int
    seconds: float


Part = Plan | OperatorCall


def provide_graph(checkpoint: Checkpoint, form: Form, dtype: str, where: Path, carried: Path | None) -> None:
    """draft.onnx and its weights in `where`: what lies there, a new export, or a graph of `carried` with the weights written anew.

    Args:
        carried: folder with FORM/draft.onnx of this drafter and dtype, exported before; its weights need not be there.
    """
    if (where / "draft.onnx").exists():
        return
    shutil.rmtree(where, ignore_errors=True)
    if carried is None:
        export_onnx(checkpoint, None, where, dtype=dtype, form=form, entries=("draft",))
        return
    where.mkdir(parents=True)
    model = onnx.load(carried / form / "draft.onnx", load_external_data=False)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer if tensor.external_data}
    placed = write_weights(checkpoint, None, tensors, where / WEIGHTS_FILE, DTYPES[dtype])
    for name, tensor in tensors.items():
        place = {"location": WEIGHTS_FILE, "offset": placed[name].offset_bytes, "length": placed[name].size_bytes}
        del tensor.external_data[:]
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
    onnx.save(model, where / "draft.onnx")  # last: its presence says that the weights are complete


def build_plans(backend: Backend, where: Path, form: Form, symbols: dict[str, int]) -> list[Part]:
    """The parts of the draft graph in `where`, in order: plans for these sizes, and between them the calls of our operators."""
    model = onnx.load(where / "draft.onnx", load_external_data=False)
    if form == "portable":
        return [_plan(backend, model, where, "whole", symbols)]
    return [
        step if isinstance(step, OperatorCall) else _plan(backend, step.model, where, f"segment{index}", symbols)
        for index, step in enumerate(cut(model))
    ]


def _plan(backend: Backend, model: onnx.ModelProto, folder: Path, name: str, symbols: dict[str, int]) -> Plan:
    """`model`, whose weights lie in `folder`, as a plan; one that lies there is taken as it is."""
    stem = "-".join([name, *(f"{key}{size}" for key, size in symbols.items()), backend.version])
    plan, record = folder / f"{stem}.plan", folder / f"{stem}.json"
    if not plan.exists():
        source = folder / f"{stem}.unfinished.onnx"
        onnx.save(_freeze(model, symbols), source)
        sizes = {key: Range(size, size, size) for key, size in symbols.items()}
        graph = load_graph(source, ProfileSpec(**sizes, tokens=Range(1, 1, 1)))
        target = resolve_target(backend.name, backend.version, backend.module, None)
        report = build_one(backend, graph, folder, target, None, lambda _message: None)
        record.write_text(json.dumps({"nodes": len(model.graph.node), "seconds": report.seconds}))
        source.unlink()
        os.replace(folder / report.path, plan)
    return Plan(plan, **json.loads(record.read_text()))


def _freeze(model: onnx.ModelProto, symbols: dict[str, int]) -> onnx.ModelProto:
    """Symbolic dimensions of inputs and outputs become sizes: the builder may then specialise for them."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = evaluate_dimension(dim.dim_param, symbols, value.name)
    del model.graph.value_info[:]
    return model
