"""A fused draft graph on a host that executes standard operators only: engine segments with our plugins enqueued between them.

    python -m dspine_plugins build/gpu --archs 90 --harness
    python -m tools.bench_segments --drafter DRAFTER --plugins build/gpu --batch 1 --context 1024 --out segments.json

TensorRT-RTX 1.6.1, the last release that executes on compute capability 9.0 (unsupported there, it says), refuses custom operators in
its parser. So the graph is cut at them (`lowering/segments.py`), every segment becomes a plan, and the real IPluginV3 objects of
libdspine_trt_plugins.so run between the plans on the same stream, all in one CUDA graph. Tokens are compared with the eager model and the
kernels; times stand beside the portable graph's plan (no operators of ours) and the torch executor's pass.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dspine_export.checkpoint.load import Checkpoint
from dspine_export.lowering.engine import ProfileSpec, Range
from dspine_export.lowering.engine.backend import Backend, open_backend
from dspine_export.lowering.engine.build import build_one
from dspine_export.lowering.engine.graph import load_graph
from dspine_export.lowering.engine.profile import evaluate_dimension
from dspine_export.lowering.engine.target import resolve_target
from dspine_export.lowering.onnx_export import WEIGHTS_FILE, export_onnx
from dspine_export.lowering.segments import OperatorCall, cut
from dspine_export.lowering.weights import write_weights
from dspine_export.model.drafter import Drafter
from dspine_export.model.loading import load_checkpoint
from dspine_export.ops_schema import OPS
from dspine_export.runtime.bench.timing import call_us, capture, replay_us

Step = Callable[[dict[str, Tensor]], None]


def freeze(model: onnx.ModelProto, symbols: dict[str, int]) -> onnx.ModelProto:
    """Symbolic dimensions of inputs and outputs become sizes: the builder may then specialise for them."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = evaluate_dimension(dim.dim_param, symbols, value.name)
    del model.graph.value_info[:]
    return model


def build_plan(backend: Backend, model: onnx.ModelProto, folder: Path, name: str, symbols: dict[str, int]) -> Path:
    """`model`, whose weights lie in `folder`, as a plan for these sizes."""
    path = folder / f"{name}.onnx"
    onnx.save(freeze(model, symbols), path)
    sizes = {key: Range(size, size, size) for key, size in symbols.items()}
    graph = load_graph(path, ProfileSpec(**sizes, tokens=Range(1, 1, 1)))
    target = resolve_target(backend.name, backend.version, backend.module, None)
    build_one(backend, graph, folder, target, None, lambda _message: None)
    return folder / f"{name}.plan"


def plan_step(backend: Backend, plan: Path) -> Step:
    """Runs a plan on the values it names."""
    from dspine_export.runtime.plan_runner import load_plan

    runner = load_plan(backend, plan, torch.device("cuda"))

    def run(values: dict[str, Tensor]) -> None:
        values.update(runner.run(values))

    return run


def plugin_step(call: OperatorCall, plugins: Path, compute: torch.dtype) -> Step:
    """Enqueues a plugin object that went through create, serialise and clone."""
    from dspine_plugins.build import HARNESS_NAME, LIBRARY_NAME
    from dspine_plugins.harness.binding import HarnessPlugin

    from dspine_export.passes.torch_ops import bind_dimensions

    schema = next(op for op in OPS if op.op_type == call.op_type)
    plugin = HarnessPlugin(plugins / HARNESS_NAME, plugins / LIBRARY_NAME, call.op_type, call.attributes)
    workspace: list[Tensor] = []

    def run(values: dict[str, Tensor]) -> None:
        inputs = [values[name] for name in call.inputs]
        sizes = bind_dimensions(schema, [tuple(tensor.shape) for tensor in inputs])
        outputs = [
            torch.empty(
                [sizes[s] for s in out.shape],
                dtype=compute if out.dtype == "T" else getattr(torch, out.dtype),
                device="cuda",
            )
            for out in schema.outputs
        ]
        if not workspace:
            workspace.append(torch.empty(max(plugin.configure(inputs, outputs), 1), dtype=torch.uint8, device="cuda"))
        plugin.enqueue(inputs, outputs, workspace[0], torch.cuda.current_stream().cuda_stream)
        values.update(zip(call.outputs, outputs, strict=True))

    return run


def operator_weights(folder: Path, model: onnx.ModelProto, steps: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Initialisers that operators read, on the GPU."""
    wanted = {name for step in steps if isinstance(step, OperatorCall) for name in step.inputs}
    with safe_open(folder / WEIGHTS_FILE, "pt", device="cuda") as stored:
        for tensor in model.graph.initializer:
            if tensor.name in wanted:
                yield tensor.name, stored.get_tensor(tensor.name)


def segmented_pass(
    backend: Backend, folder: Path, plugins: Path, symbols: dict[str, int], feeds: dict[str, Tensor]
) -> tuple[Callable[[], dict[str, Tensor]], list[str], float]:
    """The whole pass as one call, what it consists of, and the seconds of building its plans."""
    model = onnx.load(folder / "draft.onnx", load_external_data=False)
    parts = cut(model)
    constants = feeds | dict(operator_weights(folder, model, parts))
    started, steps, names = time.monotonic(), [], []
    for index, part in enumerate(parts):
        if isinstance(part, OperatorCall):
            steps.append(plugin_step(part, plugins, feeds["keys"].dtype))
            names.append(part.op_type)
        else:
            plan = build_plan(backend, part.model, folder, f"segment{index}", symbols)
            steps.append(plan_step(backend, plan))
            names.append(f"plan of {len(part.model.graph.node)} nodes")

    def run() -> dict[str, Tensor]:
        values = dict(constants)
        for step in steps:
            step(values)
        return values

    return run, names, time.monotonic() - started


def measure(run: Callable[[], dict[str, Tensor]], reference: dict[str, Tensor]) -> dict[str, Any]:
    """Tokens against the references, then times on the stream and in a CUDA graph."""
    values = run()
    torch.cuda.synchronize()
    time.sleep(2)  # kernels for these shapes may be compiled in the background
    result: dict[str, Any] = {"tokens": reference["eager"].numel()}
    for name, tokens in reference.items():
        result[f"equal_to_{name}"] = int((run()["tokens"] == tokens).sum())
    assert values["tokens"].shape == reference["eager"].shape
    result["stream_us"] = call_us(run)
    try:
        result["graph_us"] = replay_us(capture(run))
    except RuntimeError as error:
        result["graph_us"], result["capture_error"] = None, str(error)[:300]
    return result


def torch_pass(drafter: Drafter, feeds: dict[str, Tensor]) -> tuple[Tensor, float]:
    """The torch executor's tokens and microseconds."""
    from dspine_export.runtime.kernel_pass import CacheView, DraftPass
    from dspine_export.runtime.packed_weights import pack

    packed = pack(drafter, feeds["keys"].shape[3] + 2 * drafter.config.block_size)
    draft = DraftPass(drafter.config, packed, CacheView(feeds["keys"], feeds["values"], feeds["context_lengths"]))
    draft.anchor_ids.copy_(feeds["anchor_ids"])
    microseconds = replay_us(capture(draft.launch))
    return draft.tokens.clone(), microseconds


def random_feeds(drafter: Drafter, batch: int, context: int) -> dict[str, Tensor]:
    """A greedy draft over a full cache."""
    config, like = drafter.config, drafter.embed_tokens
    shape = (batch, config.num_layers, config.num_kv_heads, context, config.head_dim)
    generator = torch.Generator("cuda").manual_seed(0)
    return {
        "anchor_ids": torch.randint(0, config.mask_token_id, (batch,), device="cuda", generator=generator),
        "context_lengths": torch.full((batch,), context, device="cuda"),
        "keys": torch.randn(shape, device="cuda", generator=generator).to(like),
        "values": torch.randn(shape, device="cuda", generator=generator).to(like),
        "temperature": torch.zeros(batch, device="cuda"),
        "uniforms": torch.zeros(batch, config.block_size - 1, device="cuda"),
        "embed_tokens": like,
        "lm_head": drafter.lm_head,
    }


def open_drafter(a: argparse.Namespace) -> Drafter:
    """The checkpoint on the GPU, bound to the given tables or to random ones."""
    loaded = load_checkpoint(a.drafter)
    dtype = getattr(torch, a.dtype)
    if a.io is not None:
        io = load_file(a.io, device="cuda")
        tables = [io[f"{name}.weight"].to(dtype) for name in ("embed_tokens", "lm_head")]
    else:
        shape = (loaded.config.vocab_size, loaded.config.hidden_size)
        tables = [torch.empty(shape, device="cuda", dtype=dtype).normal_(std=0.03) for _ in range(2)]
    return loaded.bind(embed_tokens=tables[0], lm_head=tables[1])


def provide_graph(checkpoint: Checkpoint, a: argparse.Namespace, form: str, where: Path) -> None:
    """draft.onnx and its weights in `where`: exported, or a carried graph with the weights written anew, whose layout is the same."""
    if a.graphs is None:
        export_onnx(checkpoint, None, where, dtype=a.dtype, form=form, entries=("draft",))  # type: ignore[arg-type]
        return
    where.mkdir(parents=True)
    shutil.copy(a.graphs / form / "draft.onnx", where)
    model = onnx.load(where / "draft.onnx", load_external_data=False)
    names = [tensor.name for tensor in model.graph.initializer if tensor.external_data]
    write_weights(checkpoint, None, names, where / WEIGHTS_FILE, getattr(torch, a.dtype))


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--drafter", type=Path, required=True)
    add("--plugins", type=Path, required=True, help="directory of libdspine_trt_plugins.so and libdspine_harness.so")
    add("--io", type=Path, help="safetensors with embed_tokens.weight and lm_head.weight; random tables without")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--batch", type=int, default=1)
    add("--context", type=int, default=1024)
    add("--no-portable", action="store_true", help="leave out the plan of the portable graph")
    add(
        "--graphs",
        type=Path,
        help="folder with fused/draft.onnx and portable/draft.onnx of this drafter, exported before",
    )
    add("--work", type=Path, help="folder for graphs and plans, temporary by default")
    add("--out", type=Path, required=True)
    return parser.parse_args()


@torch.no_grad()
def run(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything; the result as JSON."""
    torch.backends.cuda.matmul.allow_tf32 = False
    backend, drafter = open_backend("tensorrt-rtx"), open_drafter(a)
    feeds, symbols = random_feeds(drafter, a.batch, a.context), {"batch": a.batch, "context": a.context}
    state = drafter.new_state(a.batch, a.context)
    state.keys, state.values, state.lengths = feeds["keys"], feeds["values"], feeds["context_lengths"]
    kernel_tokens, kernel_us = torch_pass(drafter, feeds)
    reference = {"eager": drafter.draft_from(state, feeds["anchor_ids"]).tokens, "kernels": kernel_tokens}
    result: dict[str, Any] = {
        "what": "fused draft graph as engine segments with our plugins between them",
        "label": f"{backend}, unsupported arch" if backend.version.startswith("1.6") else str(backend),
        "device": torch.cuda.get_device_name(),
        "drafter": str(a.drafter),
        "dtype": a.dtype,
        **symbols,
        "kernels": {"graph_us": kernel_us, "equal_to_eager": int((kernel_tokens == reference["eager"]).sum())},
    }
    checkpoint = load_checkpoint(a.drafter).checkpoint
    for form in ("fused",) if a.no_portable else ("fused", "portable"):
        where = folder / form
        provide_graph(checkpoint, a, form, where)
        if form == "fused":
            work, result["steps"], seconds = segmented_pass(backend, where, a.plugins, symbols, feeds)
        else:
            started = time.monotonic()
            model = onnx.load(where / "draft.onnx", load_external_data=False)
            step = plan_step(backend, build_plan(backend, model, where, "whole", symbols))
            seconds = time.monotonic() - started

            def work(step: Step = step) -> dict[str, Tensor]:
                values = dict(feeds)
                step(values)
                return values

        result["segments" if form == "fused" else "portable"] = {
            "build_seconds": round(seconds, 1),
            **measure(work, reference),
        }
        print(form, json.dumps(result["segments" if form == "fused" else "portable"]), flush=True)
    return result


def main() -> None:
    """Command line."""
    a = parse_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        result = run(a, a.work or Path(temporary))
    a.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
