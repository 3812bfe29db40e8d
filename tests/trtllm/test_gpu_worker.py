"""The worker's loop on a GPU, every draft step replayed from a CUDA graph as TensorRT-LLM does: kernels, and a plan that really runs.

The plan is built from the portable graphs, which hold no plugin, so that TensorRT-RTX 1.6.1 executes it on compute capability 9.0 too.
DSPINE_TEST_GRAPHS names a folder with those graphs where they cannot be exported.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine_export.bundle import Bundle, EngineEntry, inventory, open_bundle, write_manifest
from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.lowering.engine import ProfileSpec, Range, build_engines
from dspine_export.lowering.engine.discovery import discover
from dspine_export.lowering.onnx_export import export_onnx
from dspine_export.model.loading import load_checkpoint
from dspine_export.recipes import Profile
from dspine_export.trtllm.draft_model import DSpineForCausalLM

from .conftest import GOLDEN, Package, Tables
from .draft_models import make_draft_model, make_serving_loop
from .worker_loop import Request, ServingLoop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PROFILE = {"batch": (1, 1, 4), "context": (1, 64, 112), "tokens": (1, 8, 64)}


class GraphedDrafts:
    """Stands in for the worker's `draft`: one CUDA graph per batch size, from the embedding of the anchors to the drafted tokens."""

    def __init__(self, draft: DSpineForCausalLM) -> None:
        self.draft, self.replays = draft, 0
        self.mask = torch.tensor([draft.mask_token_id], device="cuda")
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}

    def __call__(self, draft_model: Any, inputs: dict[str, Any], attention: Any, metadata: Any) -> Tensor:
        values = [inputs[name] for name in ("first_prev_tokens", "num_ctx_per_req", "ctx_cache_batch_idx")]
        batch = values[0].shape[0]
        if batch not in self.graphs:
            self.graphs[batch] = self._capture(inputs, values)
        graph, places, tokens = self.graphs[batch]
        for place, value in zip(places, values, strict=True):
            place.copy_(value)
        graph.replay()
        self.replays += 1
        return tokens.clone()

    def _capture(
        self, inputs: dict[str, Any], values: list[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        places = [value.clone() for value in values]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles the kernels
                self._step(inputs, *places)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = self._step(inputs, *places)
        return graph, places, tokens

    def _step(self, inputs: dict[str, Any], anchors: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        draft, batch, width = self.draft, anchors.shape[0], self.draft.block_size
        embedded = draft.model.embed_tokens(torch.cat((anchors, self.mask)))
        noise = embedded[-1].expand(batch, width, -1)
        caches = {name: inputs[name] for name in ("ctx_k_cache", "ctx_v_cache", "ctx_kv_cache", "ctx_page_table")}
        hidden = draft.dflash_forward(noise, lengths[:, None], lengths, ctx_cache_batch_idx=rows, **caches)
        states = hidden.view(batch, width, -1)[:, 1:].flatten(0, 1)
        logits = draft.logits_processor(states, draft.lm_head, None, True).view(batch, width - 1, -1)
        return draft.apply_markov_chain_logits(logits, anchors).argmax(-1)


@pytest.fixture
def gpu_loop(package: Package, tables: Tables) -> Callable[..., ServingLoop]:
    """Loop, reference and target on the GPU, in float32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    there = Tables(tables.embed_tokens.cuda(), tables.lm_head.cuda())
    reference = load_checkpoint(GOLDEN / "drafter").bind(
        embed_tokens=there.embed_tokens, lm_head=there.lm_head, check_codes=False
    )

    def make(bundle: Bundle, executor: Any, backend: str) -> ServingLoop:
        draft = make_draft_model(gpu, bundle, there, backend=backend, executor=executor)
        return make_serving_loop(gpu, draft, backend, reference)

    gpu = replace(package, device="cuda")
    return make


def serve(loop: ServingLoop) -> int:
    """Ragged prompts, chunks, every kind of rejection, a request that leaves and one that joins; blocks compared with the reference."""
    first, second, long = Request(1, list(range(9))), Request(2, [7]), Request(3, list(range(40, 80)))
    loop.step(prefill=[(first, 9), (second, 1), (long, 16)])
    loop.step(prefill=[(long, 24)], generate=[(first, 3), (second, 0)])
    for accepted in ((0, 7, 2), (7, 1, 0), (4, 4, 7)):
        loop.step(generate=list(zip((first, second, long), accepted, strict=True)))
    joined = Request(4, [5, 200, 31])
    loop.step(prefill=[(joined, 3)], generate=[(second, 6), (long, 1)])  # the first one has left
    loop.step(generate=[(joined, 2), (second, 0), (long, 5)])
    loop.step(generate=[(joined, 7)])
    return sum(request.checked_blocks for request in (first, second, long, joined))


def check(loop: ServingLoop, *, graphed: bool, label: str) -> None:
    if graphed:
        loop.worker.draft = GraphedDrafts(loop.draft_model)
    torch.cuda.synchronize()
    started = time.monotonic()
    blocks = serve(loop)
    print(f"\n{label}: {blocks} blocks equal to the reference, {time.monotonic() - started:.1f} s")
    assert blocks == 17
    if graphed:
        assert loop.worker.draft.replays == 7
        assert sorted(loop.worker.draft.graphs) == [1, 2, 3]


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("backend", ["VANILLA", "TRTLLM"])
def test_kernels(gpu_loop: Callable[..., ServingLoop], shared_bundle: Bundle, backend: str, graphed: bool) -> None:
    loop = gpu_loop(shared_bundle, "torch", backend)
    assert type(loop.draft_model.executor).__name__ == "KernelBlock"
    check(loop, graphed=graphed, label=f"kernels, {backend}, {'graph' if graphed else 'eager'}")


@pytest.fixture(scope="module")
def plan_bundle(shared_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle with an engine of plugin-free float32 plans, built here."""
    builder = discover("tensorrt-rtx")
    if not builder.usable:
        pytest.skip(f"no TensorRT-RTX here: {builder.problem}")
    folder = tmp_path_factory.mktemp("plan")
    out = shutil.copytree(shared_bundle.path, folder / "out")
    graphs = Path(os.environ.get("DSPINE_TEST_GRAPHS", folder / "graphs"))
    if not graphs.is_dir():
        export_onnx(open_checkpoint(out / "drafter"), None, graphs, dtype="float32", form="portable")
    spec = ProfileSpec(**{name: Range(*sizes) for name, sizes in PROFILE.items()})
    report = build_engines(graphs, out, profile=spec, plugin_library=None, builder="tensorrt-rtx")
    place = report.folder.relative_to(out).as_posix()
    profile = {name: dict(zip(("min", "opt", "max"), sizes, strict=True)) for name, sizes in PROFILE.items()}
    engine = EngineEntry(
        id=place, builder=report.builder, builder_version=report.version, sm=report.sm,
        compute_capabilities=report.compute_capabilities, plans={p.entry: f"{place}/{p.path}" for p in report.plans},
        profile=Profile.model_validate(profile),
    )  # fmt: skip
    manifest = shared_bundle.manifest
    write_manifest(out, manifest.model_copy(update={"engines": (engine,), "files": tuple(inventory(out, []))}))
    return open_bundle(out)


@pytest.mark.parametrize("backend", ["VANILLA", "TRTLLM"])
def test_plan(gpu_loop: Callable[..., ServingLoop], plan_bundle: Bundle, backend: str) -> None:
    """Through `choose_engine` and the manifest checks, as at a server's start."""
    loop = gpu_loop(plan_bundle, "plan", backend)
    assert type(loop.draft_model.executor).__name__ == "PlanBlock"
    check(loop, graphed=False, label=f"plan, {backend}, eager")


def test_plan_in_a_graph(gpu_loop: Callable[..., ServingLoop], plan_bundle: Bundle) -> None:
    check(gpu_loop(plan_bundle, "plan", "VANILLA"), graphed=True, label="plan, VANILLA, graph")
