"""A fused draft graph on a host that executes standard operators only: engine segments with our plugins enqueued between them.

    python -m dspine_plugins build/gpu --archs 90 --harness
    python -m tools.bench_segments --drafter DRAFTER --plugins build/gpu --batch 1 8 --context 1024 --out segments.json

TensorRT-RTX 1.6.1, the last release that executes on compute capability 9.0 (unsupported there, it says), refuses custom operators in
its parser. So the graph is cut at them (`lowering/segments.py`), every segment becomes a plan, and the real IPluginV3 objects of
libdspine_trt_plugins.so run between the plans on the same stream, all in one CUDA graph. Tokens are compared with the eager model and the
kernels; times stand beside the portable graph's plan (no operators of ours) and the torch executor's pass.

Plans need no GPU: with `--work FOLDER --build-only` they are made beforehand, and a run with the same folder takes what lies there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from dspine_export.errors import DspineError, UsageError
from dspine_export.lowering.engine.backend import Backend, open_backend
from dspine_export.lowering.engine.full_precision import VARIABLE
from dspine_export.lowering.onnx_export import WEIGHTS_FILE
from dspine_export.lowering.segments import OperatorCall
from dspine_export.model.drafter import Drafter
from dspine_export.model.loading import load_checkpoint
from dspine_export.ops_schema import OPS
from dspine_export.passes.pipeline import Form
from dspine_export.runtime.bench.timing import call_us, capture, replay_us
from tools.segment_plans import FORMS, Part, Plan, build_plans, provide_graph

Step = Callable[[dict[str, Tensor]], None]


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


def operator_weights(folder: Path, parts: list[Part]) -> Iterator[tuple[str, Tensor]]:
    """Initialisers that operators read, on the GPU."""
    wanted = {name for part in parts if isinstance(part, OperatorCall) for name in part.inputs}
    with safe_open(folder / WEIGHTS_FILE, "pt", device="cuda") as stored:
        for name in wanted.intersection(stored.keys()):
            yield name, stored.get_tensor(name)


def assembled_pass(
    backend: Backend, folder: Path, plugins: Path, parts: list[Part], feeds: dict[str, Tensor]
) -> Callable[[], dict[str, Tensor]]:
    """The whole pass as one call."""
    constants = feeds | dict(operator_weights(folder, parts))
    steps = [
        plan_step(backend, part.path) if isinstance(part, Plan) else plugin_step(part, plugins, feeds["keys"].dtype)
        for part in parts
    ]

    def run() -> dict[str, Tensor]:
        values = dict(constants)
        for step in steps:
            step(values)
        return values

    return run


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
    from dspine_export.runtime.injection_form import packing
    from dspine_export.runtime.kernel_pass import CacheView, DraftPass
    from dspine_export.runtime.packed_weights import pack

    positions = feeds["keys"].shape[3] + 2 * drafter.config.block_size
    packed = pack(drafter, positions, **packing(feeds["keys"].element_size()))
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
    # Random tables are not what the codes were made from; comparing them takes eigenvectors of [d, d].
    return loaded.bind(embed_tokens=tables[0], lm_head=tables[1], check_codes=a.io is not None)


def parse_arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--drafter", type=Path, required=True)
    add("--plugins", type=Path, required=True, help="directory of libdspine_trt_plugins.so and libdspine_harness.so")
    add("--io", type=Path, help="safetensors with embed_tokens.weight and lm_head.weight; random tables without")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--batch", type=int, nargs="+", default=[1])
    add("--context", type=int, default=1024)
    add("--no-portable", action="store_true", help="leave out the plan of the portable graph")
    add(
        "--graphs",
        type=Path,
        help="folder with fused/draft.onnx and portable/draft.onnx of this drafter and dtype, exported before",
    )
    add("--work", type=Path, help="folder for graphs and plans, temporary by default; what lies there is used again")
    add("--build-only", action="store_true", help="graphs and plans into --work, without a GPU")
    add("--out", type=Path, required=True)
    a = parser.parse_args()
    if not a.out.parent.is_dir():
        parser.error(f"--out: {a.out.parent} is not a directory")
    if not a.build_only and not torch.cuda.is_available():
        parser.error("the plans run on an NVIDIA GPU, torch sees none; --build-only makes them without")
    if not a.build_only and not (a.plugins / "libdspine_harness.so").is_file():
        parser.error(f"--plugins: no libdspine_harness.so in {a.plugins}; python -m dspine_plugins {a.plugins} --harness builds it")
    return a


@torch.no_grad()
def run(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything; the result as JSON."""
    torch.backends.cuda.matmul.allow_tf32 = False
    backend, forms = open_backend("tensorrt-rtx"), FORMS[:1] if a.no_portable else FORMS
    checkpoint = load_checkpoint(a.drafter).checkpoint
    if checkpoint.config.transfer is not None and checkpoint.codes is None:
        raise UsageError(
            "This drafter stores no transfer_codes, and there is no target here to make them of",
            where=a.drafter,
            fix="take one that does: dspine-export build --target vllm or tools/make_random_drafter.py writes them",
        )
    for form in forms:
        provide_graph(checkpoint, form, a.dtype, folder / form, a.graphs)
    result: dict[str, Any] = {
        "what": "fused draft graph as engine segments with our plugins between them",
        "label": f"{backend}, unsupported arch" if backend.version.startswith("1.6") else str(backend),
        "drafter": str(a.drafter),
        "dtype": a.dtype,
        VARIABLE: os.environ.get(VARIABLE),
        "cases": [],
    }
    drafter = None if a.build_only else open_drafter(a)
    if drafter is not None:
        result |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for batch in a.batch:
        case: dict[str, Any] = {"batch": batch, "context": a.context}
        result["cases"].append(case)
        try:
            case |= run_case(a, backend, folder, forms, drafter, dict(case))
        except (RuntimeError, DspineError) as error:  # a batch that does not fit costs no other's numbers
            case["failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(case), flush=True)
        a.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def run_case(
    a: argparse.Namespace,
    backend: Backend,
    folder: Path,
    forms: Sequence[Form],
    drafter: Drafter | None,
    symbols: dict[str, int],
) -> dict[str, Any]:
    """The plans of one batch size and, with a drafter, their numbers."""
    parts = {form: build_plans(backend, folder / form, form, symbols) for form in forms}
    found: dict[str, Any] = {
        "steps": [f"plan of {p.nodes} nodes" if isinstance(p, Plan) else p.op_type for p in parts["fused"]],
        "build_seconds": {form: round(sum(p.seconds for p in own if isinstance(p, Plan)), 1) for form, own in parts.items()},
    }
    if drafter is not None:
        found |= measure_case(backend, drafter, folder, a.plugins, parts, symbols)
        torch.cuda.empty_cache()
    return found


def measure_case(
    backend: Backend,
    drafter: Drafter,
    folder: Path,
    plugins: Path,
    parts: dict[Form, list[Part]],
    symbols: dict[str, int],
) -> dict[str, Any]:
    """One batch size: the torch executor's pass, the segments' and the portable plan's."""
    feeds = random_feeds(drafter, **symbols)
    state = drafter.new_state(symbols["batch"], symbols["context"])
    state.keys, state.values, state.lengths = feeds["keys"], feeds["values"], feeds["context_lengths"]
    kernel_tokens, kernel_us = torch_pass(drafter, feeds)
    reference = {"eager": drafter.draft_from(state, feeds["anchor_ids"]).tokens, "kernels": kernel_tokens}
    equal = int((kernel_tokens == reference["eager"]).sum())
    found: dict[str, Any] = {"kernels": {"graph_us": kernel_us, "equal_to_eager": equal}}
    for form, own in parts.items():
        run = assembled_pass(backend, folder / form, plugins, own, feeds)
        found["segments" if form == "fused" else "portable"] = measure(run, reference)
    return found


def main() -> int:
    """Command line; 1 where no batch size came through."""
    a = parse_arguments()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            result = run(a, a.work or Path(temporary))
        except DspineError as error:
            print(f"bench_segments: error: {error}", file=sys.stderr)
            return error.exit_code
    print(json.dumps(result, indent=1))
    return 1 if all("failed" in case for case in result["cases"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
