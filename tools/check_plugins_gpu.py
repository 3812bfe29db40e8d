"""Checks and times the TensorRT plugins on an NVIDIA GPU, without TensorRT.

    python -m dspine_plugins build/gpu --archs 90 --harness     # once, on any machine with nvcc and TensorRT headers
    python tools/check_plugins_gpu.py build/gpu                 # on the GPU machine; needs torch and this checkout only

Real IPluginV3 objects are created, serialised, created again, cloned and enqueued on device buffers; outputs are compared with a
float64 reference. Exit status 1 when any comparison fails, or when a check passes although nothing was launched.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def import_plugins() -> None:
    """Makes `dspine_export` and `dspine_plugins` importable from the checkout when the package is not installed."""
    sys.path.insert(0, str(ROOT))
    if importlib.util.find_spec("dspine_plugins") is None:
        folder = ROOT / "plugins"
        spec = importlib.util.spec_from_file_location(
            "dspine_plugins", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["dspine_plugins"] = module
        spec.loader.exec_module(module)


def main() -> int:
    """Runs the checks, then the timings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where libdspine_trt_plugins.so and libdspine_harness.so are")
    parser.add_argument("--small", action="store_true", help="small sizes only and no timings, for compute-sanitizer")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 4
    import_plugins()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    failures = run_checks(options.directory, options.small)
    failures += run_golden(options.directory) + check_the_check(options.directory)
    if not options.small:
        print_timings(options.directory)
    print("FAILED" if failures else "all checks passed", failures or "")
    return 1 if failures else 0


def run_checks(directory: Path, small: bool) -> int:
    """Every operator, case and dtype; returns the number of failures."""
    from dspine_plugins.build import HARNESS_NAME, LIBRARY_NAME
    from dspine_plugins.harness.cases import CASES
    from dspine_plugins.harness.check import check

    from dspine_export.ops_schema import OPS

    failures = 0
    for case in CASES:
        if small and case.timed:
            continue
        for op in OPS:
            compute = any(operand.dtype == "T" for operand in op.inputs)
            for name, dtype in DTYPES.items() if compute else [("float32", torch.float32)]:
                try:
                    result = "ok      " + check(
                        op.op_type, case, dtype, directory / HARNESS_NAME, directory / LIBRARY_NAME
                    )
                except (AssertionError, RuntimeError) as error:
                    failures += 1
                    result = f"FAILED  {error}"
                print(f"{case.name:24} {op.op_type:18} {name:9} {result}", flush=True)
            torch.cuda.empty_cache()
    return failures


def run_golden(directory: Path) -> int:
    """The golden cases of the test suite; returns the number of failures."""
    from dspine_plugins.build import HARNESS_NAME, LIBRARY_NAME
    from dspine_plugins.harness.golden import check_golden

    failures = 0
    for case in sorted((ROOT / "tests" / "golden").glob("*/io.safetensors")):
        try:
            check_golden(case.parent, directory / HARNESS_NAME, directory / LIBRARY_NAME)
        except (AssertionError, RuntimeError, ImportError) as error:
            failures += 1
            print(f"golden case {case.parent.name} FAILED  {error}")
        else:
            print(f"golden case {case.parent.name} ok")
    return failures


def check_the_check(directory: Path) -> int:
    """A run that launches nothing must fail for every operator; returns how many wrongly passed."""
    from dspine_plugins.build import HARNESS_NAME, LIBRARY_NAME
    from dspine_plugins.harness.cases import CASES
    from dspine_plugins.harness.check import check

    from dspine_export.ops_schema import OPS

    case = next(case for case in CASES if not case.timed)
    wrong = 0
    for op in OPS:
        try:
            check(op.op_type, case, torch.float32, directory / HARNESS_NAME, directory / LIBRARY_NAME, skip_launch=True)
        except AssertionError:
            continue
        wrong += 1
        print(f"the check of {op.op_type} passes although nothing ran")
    return wrong


def print_timings(directory: Path) -> None:
    """Microseconds per operator: inside a CUDA graph with warm caches, and launched alone with a cold L2 cache."""
    from dspine_plugins.build import HARNESS_NAME, LIBRARY_NAME
    from dspine_plugins.harness.binding import HarnessPlugin
    from dspine_plugins.harness.cases import CASES, EPS
    from dspine_plugins.harness.check import operands, prepare

    from dspine_export.ops_schema import OPS

    print(f"\n{'case':18} {'operator':18} {'dtype':9} {'graph, warm us':>15} {'launch, cold us':>16}")
    for case in (case for case in CASES if case.timed):
        for op in OPS:
            compute = any(operand.dtype == "T" for operand in op.inputs)
            for name, dtype in DTYPES.items() if compute else [("float32", torch.float32)]:
                inputs = operands(op.op_type, case, dtype, torch.Generator("cuda").manual_seed(0))
                attributes = dict.fromkeys(op.attributes, EPS)
                with HarnessPlugin(
                    directory / HARNESS_NAME, directory / LIBRARY_NAME, op.op_type, attributes
                ) as plugin:
                    prepared = prepare(plugin, op.op_type, case, inputs)
                    warm, cold = warm_us(prepared.launch), cold_us(prepared.launch)
                print(f"{case.name:18} {op.op_type:18} {name:9} {warm:15.1f} {cold:16.1f}", flush=True)
                del inputs, prepared
                torch.cuda.empty_cache()


def warm_us(launch: Callable[[], None], repeats: int = 20) -> float:
    """Median time of one call over replays of a CUDA graph that holds `repeats` of them."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            launch()
    for _ in range(3):
        graph.replay()
    return _median_us(graph.replay, lambda: None, 15) / repeats


def cold_us(launch: Callable[[], None]) -> float:
    """Median time of one call after the L2 cache was overwritten; includes the launches themselves."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    return _median_us(launch, lambda: flush.zero_(), 15)


def _median_us(run: Callable[[], object], before: Callable[[], object], samples: int) -> float:
    times = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return sorted(times)[samples // 2]


if __name__ == "__main__":
    sys.exit(main())
