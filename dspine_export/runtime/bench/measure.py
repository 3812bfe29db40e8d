"""The whole benchmark: ceilings, then the table row by row."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import DependencyError
from dspine_export.runtime.bench.table import row_line


@dataclass(frozen=True)
class BenchRequest:
    """What to measure.

    Attributes:
        source: a drafter checkpoint or bundle whose shapes are taken (weights are random); None: Qwen3-8B's drafter. A bundle's engine is
            measured as well.
        naive: time the eager model in a CUDA graph too. compile_batches: batch sizes at which torch.compile is tried, at the first context.
        stages: take our pass apart, at the first context. fp8: time it with float8 weights, at the first context.
        seconds: no cell is begun after so long.
    """

    source: Path | None = None
    batches: tuple[int, ...] = (1, 8, 32, 128)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    naive: bool = True
    compile_batches: tuple[int, ...] = (1, 32)
    stages: bool = True
    fp8: bool = True
    seconds: float = 1800.0


def run_benchmark(
    request: BenchRequest, note: Callable[[str], None], save: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """The report, JSON-ready: ceilings, shapes, and `rows` (see `cells.Row`).

    Args:
        save: given the report so far after every batch size, marked as not complete, and the whole one at the end.

    Raises:
        DependencyError: no GPU, or none that runs our kernels. CheckpointError: an unfit source.
    """
    capability = _require_gpu()
    import torch

    from dspine_export.runtime.bench.cells import release
    from dspine_export.runtime.bench.floor import Ceilings
    from dspine_export.runtime.bench.timing import copy_bandwidth_gb_s, gemm_tflop_s

    torch.backends.cuda.matmul.allow_tf32 = False
    config = _config(request.source)
    ceilings = Ceilings(copy_bandwidth_gb_s(), gemm_tflop_s())
    note(f"copy {ceilings.copy_gb_s:.0f} GB/s, GEMM {ceilings.gemm_tflop_s:.0f} TFLOP/s")
    report: dict[str, Any] = {
        "what": "One draft pass, random weights, bfloat16, microseconds; see dspine-export bench",
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "shapes": {key: value for key, value in asdict(config).items() if key in _SHAPES},
        **asdict(ceilings),
        "rows": [],
    }
    try:
        for rows in _rows(request, config, ceilings, capability, note):
            report["rows"] += rows
            if save is not None:
                save(report | {"complete": False})
    except torch.OutOfMemoryError as error:
        fix = "free the GPU's memory, or measure a smaller drafter"
        raise DependencyError("The drafters do not fit into the GPU's memory", got=str(error), fix=fix) from error
    if save is not None:
        save(report)
    release()  # what is measured next may be another process
    return report


_SHAPES = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "block_size",
    "transfer",
)


def _require_gpu() -> tuple[int, int]:
    import importlib.util

    import torch

    if not torch.cuda.is_available():
        fix = "run it on a machine with an NVIDIA GPU and a CUDA build of torch"
        raise DependencyError("The benchmark needs an NVIDIA GPU", got=f"torch {torch.__version__} sees none", fix=fix)
    if importlib.util.find_spec("triton") is None:
        raise DependencyError("Our kernels need Triton", fix="pip install triton")
    return torch.cuda.get_device_capability()


def _config(source: Path | None) -> DrafterConfig:
    from dspine_export.runtime.bench.subjects import QWEN3_8B

    if source is None:
        return QWEN3_8B
    from dspine_export.checkpoint.load import open_checkpoint
    from dspine_export.runtime.open_executor import drafter_folder

    return open_checkpoint(drafter_folder(source)).config


def _rows(
    request: BenchRequest,
    config: DrafterConfig,
    ceilings: Any,
    capability: tuple[int, int],
    note: Callable[[str], None],
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one context and batch size after another."""
    from dspine_export.runtime.bench import cells
    from dspine_export.runtime.bench.loop import round_us
    from dspine_export.runtime.bench.subjects import kinds, random_drafter
    from dspine_export.runtime.injection_form import packing
    from dspine_export.runtime.packed_weights import pack

    engine = _engine(request.source, capability, note)
    deadline = time.monotonic() + request.seconds
    drafters = {kind: random_drafter(shapes) for kind, shapes in kinds(config).items()}
    longest = max(request.contexts) + 2 * config.block_size
    subjects = {kind: (drafter, pack(drafter, longest, **packing(2))) for kind, drafter in drafters.items()}
    for context, batch in itertools.product(request.contexts, request.batches):
        first = context == request.contexts[0]
        compile_too = first and request.naive and batch in request.compile_batches
        stages, fp8 = request.stages and first, request.fp8 and first
        if time.monotonic() > deadline:
            late = {"batch": batch, "context": context}
            yield [cells.Row(kind=kind, **late, skipped={"all": "out of time"}) for kind in subjects]
            continue
        rows = {}
        for kind, (drafter, packed) in subjects.items():
            cell = cells.Cell(kind, batch, context, request.naive, compile_too, stages, fp8)
            rows[kind] = row = cells.measure_cell(cell, drafter, packed, ceilings)
            if first and "ours" in row:
                with row.measuring("round_wall"):
                    row["round_wall"] = round_us(drafter, batch, context)
            if engine is not None and drafter.config == config:
                from dspine_export.runtime.bench.engines import measure_engine

                measure_engine(row, *engine)
        cells.measure_alternately(rows, subjects)
        for row in rows.values():
            note(row_line(row))
        yield list(rows.values())


def _engine(source: Path | None, capability: tuple[int, int], note: Callable[[str], None]) -> Any:
    from dspine_export.bundle import is_bundle

    if source is None or not is_bundle(source):
        return None
    from dspine_export.runtime.bench.engines import open_engine

    try:
        return open_engine(source, capability)
    except DependencyError as error:
        note(f"the bundle's engine is left out: {str(error).splitlines()[0]}")
        return None
