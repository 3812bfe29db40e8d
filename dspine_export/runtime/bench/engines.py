"""A bundle's compiled engine in the same table, with random tables and cache in its own dtype."""

from __future__ import annotations

from pathlib import Path

import torch

from dspine_export.bundle import open_bundle
from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.runtime.bench.cells import Row
from dspine_export.runtime.bench.timing import call_us, capture, replay_us
from dspine_export.runtime.executor import CachedExecutor
from dspine_export.runtime.open_executor import DRAFTER_FOLDER
from dspine_export.runtime.plan_check import choose_engine
from dspine_export.runtime.tensorrt_executor import TensorrtExecutor, open_tensorrt


def open_engine(bundle_path: Path, capability: tuple[int, int]) -> tuple[str, TensorrtExecutor]:
    """The engine of the bundle that fits this GPU, and its name. Raises as `open_tensorrt`."""
    bundle = open_bundle(bundle_path)
    config = open_checkpoint(bundle.path / DRAFTER_FOLDER).config
    entry = choose_engine(bundle, capability).entry
    shape = (config.vocab_size, config.hidden_size)
    for dtype in (torch.bfloat16, torch.float32):
        tables = [torch.empty(shape, device="cuda", dtype=dtype).normal_(std=0.03) for _ in range(2)]
        try:
            return f"{entry.builder} {entry.builder_version}", open_tensorrt(bundle, config, *tables)
        except Exception as error:
            if dtype == torch.float32 or "another dtype" not in str(error):
                raise
    raise AssertionError


@torch.no_grad()
def measure_engine(row: Row, name: str, executor: CachedExecutor) -> None:
    """Adds `engine` to a row: microseconds, and whether the plan could be captured in a CUDA graph."""
    batch, context, config = row["batch"], row["context"], executor.config
    limits = executor.max_batch, executor.max_context
    if any(limit is not None and limit < wanted for limit, wanted in zip(limits, (batch, context), strict=True)):
        row["skipped"]["engine"] = f"its profile ends at batch {limits[0]}, context {limits[1]}"
        return
    with row.measuring("engine"):
        state = executor.new_state(batch, context)
        state.keys.normal_()
        state.values.normal_()
        state.lengths.fill_(min(context, state.capacity))
        anchors, device = torch.zeros_like(state.lengths), state.lengths.device
        heat, uniforms = torch.zeros(batch, device=device), torch.zeros(batch, config.block_size - 1, device=device)

        def run() -> object:
            return executor.draft(state, anchors, heat, uniforms)

        row["engine"] = {"name": name, "stream": call_us(run)}
        row["engine"]["graph"] = replay_us(capture(run))
