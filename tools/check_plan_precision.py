"""Which operators of a TensorRT-RTX plan lose float32 precision on this GPU, and what brings it back. About 30 s.

    python -m tools.check_plan_precision --out plan_precision.json

Every case is one operator as a plan, executed and compared with the same in float64: relative error, Frobenius norm. Products rounded to
TF32 show 3e-4, float32 below 1e-5. One process per combination, because the library reads NVIDIA_TF32_OVERRIDE when it is loaded: left
alone, set by dspine-export as for every build and run, and set by the environment; each with BuilderFlag.TF32 cleared and set.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor
from torch.nn import functional as F

from dspine_export.errors import DspineWarning
from dspine_export.lowering.engine.backend import Backend, open_backend
from dspine_export.lowering.engine.full_precision import OFF, VARIABLE
from dspine_export.runtime.plan_runner import load_plan

OVERRIDES = ("left alone", "dspine-export", "environment")
FLAGS = {"clear": "clear_flag", "set": "set_flag"}
PRODUCTS = {"matmul_7": (7, 64, 320), "matmul_112": (112, 64, 320), "matmul_2048_deep": (16, 2048, 256)}
Case = tuple[str, list[onnx.NodeProto], dict[str, Tensor], Tensor, tuple[str, ...]]


def cases() -> Iterator[Case]:
    """Name, nodes that make `y`, their inputs, the float64 answer, and which inputs are constants of the plan."""
    torch.manual_seed(0)
    for name, (rows, depth, columns) in PRODUCTS.items():
        x, w = torch.randn(1, rows, depth, device="cuda"), torch.randn(depth, columns, device="cuda")
        nodes, answer = [helper.make_node("MatMul", ["x", "w"], ["y"])], x.double() @ w.double()
        yield name, nodes, {"x": x, "w": w}, answer, ("w",)
        yield f"{name}_input_weight", nodes, {"x": x, "w": w}, answer, ()
    q, k, v = (torch.randn(1, heads, rows, 64, device="cuda") for heads, rows in ((4, 16), (2, 80), (2, 80)))
    attention = helper.make_node("Attention", ["q", "k", "v"], ["y"])
    attention.attribute.append(helper.make_attribute("TRT_decomposable", 1))
    answer = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    yield "attention", [attention], {"q": q, "k": k, "v": v}, answer, ()
    x, w = torch.randn(1, 16, 512, device="cuda"), torch.rand(512, device="cuda")
    norm = helper.make_node("RMSNormalization", ["x", "w"], ["y"], epsilon=1e-6, stash_type=1)
    yield "rms_norm", [norm], {"x": x, "w": w}, F.rms_norm(x.double(), (512,), w.double(), 1e-6), ()
    angles = torch.linspace(0, 4000, 512, device="cuda").view(1, 1, 512)
    yield "cos_to_4000", [helper.make_node("Cos", ["x"], ["y"])], {"x": angles}, angles.double().cos(), ()
    yield "softmax", [helper.make_node("Softmax", ["x"], ["y"])], {"x": x}, x.double().softmax(-1), ()


def run_plan(backend: Backend, flag: str, case: Case, folder: Path) -> Tensor:
    """Builds one case and executes it."""
    name, nodes, feeds, answer, constants = case
    describe = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    inputs = [describe(key, shape=list(tensor.shape)) for key, tensor in feeds.items() if key not in constants]
    output = describe("y", shape=list(answer.shape))
    stored = [numpy_helper.from_array(feeds[key].cpu().numpy(), key) for key in constants]
    graph = helper.make_graph(nodes, name, inputs, [output], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    builder = backend.module.Builder(backend.logger)
    network = builder.create_network(0)
    parser = backend.module.OnnxParser(network, backend.logger)
    if not parser.parse(model.SerializeToString()):
        raise SystemExit(f"{name}: {parser.get_error(0).desc()}")
    config = builder.create_builder_config()
    getattr(config, FLAGS[flag])(backend.module.BuilderFlag.TF32)
    plan = folder / f"{name}.plan"
    plan.write_bytes(bytes(builder.build_serialized_network(network, config)))
    return load_plan(backend, plan, torch.device("cuda")).run(feeds)["y"]


def measure(override: str, flag: str) -> None:
    """One combination, in a process of its own; prints one line of JSON per case."""
    warnings.simplefilter("ignore", DspineWarning)
    if override == "left alone":
        importlib.import_module("tensorrt_rtx")  # before dspine-export can set the variable
    backend = open_backend("tensorrt-rtx")
    if override == "left alone":
        del os.environ[VARIABLE]
    print(json.dumps({"label": str(backend), "device": torch.cuda.get_device_name()}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            got = run_plan(backend, flag, case, Path(folder))
            error = float((got.double() - case[3]).norm() / case[3].norm())
            print(json.dumps({case[0]: error}), flush=True)


def start(override: str, flag: str) -> subprocess.Popen[str]:
    """A process that measures one combination."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if override == "environment":
        environment[VARIABLE] = OFF
    command = [sys.executable, "-m", "tools.check_plan_precision", "--one", override, flag]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """What the process printed; what it had printed by then when its time is over."""
    try:
        text, _ = process.communicate(timeout=max(seconds, 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
    found: dict[str, Any] = {}
    for line in text.splitlines():
        found |= json.loads(line) if line.startswith("{") else {}
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.devnull)
    parser.add_argument("--seconds", type=float, default=60, help="after which unfinished combinations are ended")
    parser.add_argument("--one", nargs=2, metavar=("OVERRIDE", "FLAG"), help="measure one combination in this process")
    a = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    if a.one:
        return measure(*a.one)
    end, runs = time.monotonic() + a.seconds, []
    result = {
        "what": "relative errors of float32 operators in plans",
        "command": "python -m tools.check_plan_precision",
    }
    for override, flag, process in [(o, f, start(o, f)) for o in OVERRIDES for f in FLAGS]:
        errors = finish(process, end - time.monotonic())
        result |= {key: errors.pop(key) for key in ("label", "device") if key in errors}
        runs.append({"override": override, "flag": flag, "errors": errors})
        print(json.dumps(runs[-1]), flush=True)
    a.out.write_text(json.dumps({**result, "runs": runs}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
