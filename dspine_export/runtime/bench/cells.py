"""One cell of the table: a kind of drafter at one batch size and context length, by every contender that fits."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dspine_export.errors import DependencyError
from dspine_export.model.drafter import Drafter
from dspine_export.model.state import DraftState
from dspine_export.runtime.bench.floor import Ceilings, cache_bytes, floor_us
from dspine_export.runtime.bench.naive import compiled, naive_pass
from dspine_export.runtime.bench.timing import SAMPLES, call_us, capture, replay_us
from dspine_export.runtime.kernel_pass import CacheView, ContextPass, DraftPass
from dspine_export.runtime.packed_weights import PackedDrafter
from dspine_export.runtime.pass_factory import PassFactory

# Device memory the pass itself needs beyond the cache, in units of the logits' size: float32 and bfloat16 logits, activations.
WORKSPACE_LOGITS = 3
NAIVE_CACHES = (
    0.6  # of the cache: each layer's keys and values are copied to join the block's, and the mask is expanded
)


@dataclass(frozen=True)
class Cell:
    """Where to measure. `stages`: take the pass apart as well."""

    kind: str
    batch: int
    context: int
    naive: bool = True
    compile: bool = False
    stages: bool = False
    fp8: bool = False


class Row(dict[str, Any]):
    """Numbers of one cell, microseconds unless named otherwise; `skipped` says why one is missing."""

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """A contender that runs out of memory or fails is named in `skipped`; the others go on."""
        try:
            yield
        except (DependencyError, RuntimeError, torch._dynamo.exc.TorchDynamoException) as error:
            self["skipped"][name] = _reason(error)
            _let_go(error)
        release()


def _reason(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__cause__, torch.OutOfMemoryError):
        return "out of GPU memory"
    return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def _let_go(error: BaseException | None) -> None:
    """What the functions that failed were holding would live as long as the error, which is longer than `release` waits."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__


def release() -> None:
    """Returns the device memory of what nobody uses: passes and their layers know each other, so that only the collector frees them."""
    gc.collect()
    torch.cuda.empty_cache()


def measure_cell(cell: Cell, drafter: Drafter, packed: PackedDrafter, ceilings: Ceilings) -> Row:
    """Times every contender on one random state."""
    config = drafter.config
    row = Row(kind=cell.kind, batch=cell.batch, context=cell.context, skipped={})
    row["floor"] = floor_us(config, cell.batch, cell.context, ceilings)
    release()
    free = _free_bytes()
    logits = 4 * cell.batch * config.block_size * config.vocab_size
    held = cache_bytes(config, cell.batch, cell.context + config.block_size)
    if held + WORKSPACE_LOGITS * logits > free:
        row["skipped"]["all"] = (
            f"the cache and the pass need {(held + 3 * logits) / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
        )
        return row
    with row.measuring("all"):
        state, anchors = _random_state(cell, drafter)
    if "all" in row["skipped"]:
        return row
    with row.measuring("ours"):
        tokens = _ours(cell, row, packed, state, anchors, drafter)
        if cell.naive:
            _naive(cell, row, drafter, state, anchors, tokens)
        row[f"append_{config.block_size}"] = _append_us(drafter, packed, state)
    if cell.fp8 and "ours" in row:
        with row.measuring("ours_fp8"):
            row["ours_fp8"] = _fp8_us(cell, drafter, state)
            row["floor_fp8"] = floor_us(config, cell.batch, cell.context, ceilings, weight_bytes=1)
    return row


def measure_alternately(rows: dict[str, Row], subjects: dict[str, tuple[Drafter, PackedDrafter]]) -> None:
    """Gives the rows of one cell `alternating`: our passes again, by turns, so that their ratio is not the clock's."""
    if len(rows) < 2 or not all("ours" in row for row in rows.values()):
        return
    last = next(reversed(rows.values()))
    with last.measuring("alternating"):
        graphs = {}
        drafter = next(iter(subjects.values()))[0]  # the others attend the same cache: at its longest there is no room for two
        state, anchors = _random_state(Cell(last["kind"], last["batch"], last["context"]), drafter)
        for kind, (drafter, packed) in subjects.items():
            draft = DraftPass(drafter.config, packed, CacheView(state.keys, state.values, state.lengths))
            draft.anchor_ids.copy_(anchors)
            graphs[kind] = capture(draft.launch), draft  # the pass owns the graph's buffers
        times: dict[str, list[float]] = {kind: [] for kind in graphs}
        for _ in range(SAMPLES):
            for kind, (graph, _draft) in graphs.items():
                times[kind].append(replay_us(graph, samples=1))
        for kind, samples in times.items():
            rows[kind]["alternating"] = median(samples)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def _random_state(cell: Cell, drafter: Drafter) -> tuple[DraftState, Tensor]:
    state = drafter.new_state(cell.batch, cell.context + drafter.config.block_size)
    state.keys.normal_()
    state.values.normal_()
    state.lengths.fill_(cell.context)
    generator = torch.Generator(state.lengths.device).manual_seed(1)
    most = drafter.config.mask_token_id
    return state, torch.randint(most, (cell.batch,), device=state.lengths.device, generator=generator)


def _ours(cell: Cell, row: Row, packed: PackedDrafter, state: DraftState, anchors: Tensor, drafter: Drafter) -> Tensor:
    cache = CacheView(state.keys, state.values, state.lengths)
    draft = DraftPass(drafter.config, packed, cache)
    draft.anchor_ids.copy_(anchors)
    graph = capture(draft.launch)
    row["ours"] = replay_us(graph)
    tokens = draft.tokens.clone()
    if cell.stages:
        row["stages"] = {
            # The whole pass anew each time: under load the clock falls.
            stage: replay_us(graph) - replay_us(capture(_without(draft, stage)))
            for stage in dict.fromkeys(step.stage for step in draft.steps)
        }
    return tokens


def _fp8_us(cell: Cell, drafter: Drafter, state: DraftState) -> float:
    passes = PassFactory(drafter, cell.context + 2 * drafter.config.block_size, "fp8")
    draft = passes.draft(CacheView(state.keys, state.values, state.lengths), cell.batch)
    return replay_us(capture(draft.launch))


def _append_us(drafter: Drafter, packed: PackedDrafter, state: DraftState) -> float:
    """One block's commit per sequence, over the start of the cache again and again."""
    lengths = torch.zeros_like(state.lengths)
    append = ContextPass(
        drafter.config, packed, CacheView(state.keys, state.values, lengths), drafter.config.block_size
    )
    append.target_hidden.normal_()
    append.counts.fill_(drafter.config.block_size)

    def run() -> None:
        append.launch()
        lengths.zero_()

    return replay_us(capture(run))


def _without(draft: DraftPass, stage: str) -> Callable[[], None]:
    """The pass less one stage: its cost by subtraction."""
    steps = [step for step in draft.steps if step.stage != stage]

    def run() -> None:
        for step in steps:
            step.run()

    return run


@torch.no_grad()
def _naive(cell: Cell, row: Row, drafter: Drafter, state: DraftState, anchors: Tensor, tokens: Tensor) -> None:
    extra, free = NAIVE_CACHES * state.keys.nbytes, _free_bytes()
    if extra > free:
        row["skipped"]["naive_graph"] = f"copies of the cache need {extra / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"
        return
    run = naive_pass(drafter, state, anchors)
    with row.measuring("naive_graph"):
        row["equal_tokens"] = float((run() == tokens).float().mean())
        row["naive_graph"] = replay_us(capture(run, warmup=2))
    if cell.batch == 1:
        with row.measuring("naive_eager"):
            row["naive_eager"] = call_us(run)
    if cell.compile:
        with row.measuring("compiled_graph"):
            started = time.monotonic()
            row["compiled_graph"] = replay_us(capture(compiled(run), warmup=2))
            row["compile_seconds"] = round(time.monotonic() - started, 1)
