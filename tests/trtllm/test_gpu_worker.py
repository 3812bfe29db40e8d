"""The worker's loop on a GPU, every draft step replayed from a CUDA graph as TensorRT-LLM does: kernels, and a plan that really runs.

The plan is built from the portable graphs, which hold no plugin, so that TensorRT-RTX 1.6.1 executes it on compute capability 9.0 too. It
is held to what the plan itself returns, and its tokens to the reference's: all of them where float32 products are float32, and where the
environment lets TF32 in, all but what the deviation of its scores leaves undecided (`parted_blocks`).
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
from dspine_export.lowering.engine.full_precision import OFF, VARIABLE
from dspine_export.lowering.onnx_export import export_onnx
from dspine_export.model.loading import load_checkpoint
from dspine_export.recipes import Profile
from dspine_export.runtime.plan_runner import PlanRunner
from dspine_export.trtllm.draft_model import DSpineForCausalLM
from dspine_export.trtllm.plan_block import PlanBlock

from .conftest import GOLDEN, Package, Tables
from .direct_plan import DirectRuns
from .draft_models import make_draft_model, make_serving_loop
from .parted_blocks import Undecided, published_deviation
from .worker_loop import ServingLoop, serve

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PROFILE = {"batch": (1, 1, 4), "context": (1, 64, 112), "tokens": (1, 8, 64)}


class GraphedDrafts:
    """Stands in for the worker's `draft`: one CUDA graph per batch size, from the embedding of the anchors to the refined logits.

    Args:
        compares: also run every step without its graph and demand the same logits bit for bit; of a plan they hold the candidates
            and the scores of the walk.
    """

    def __init__(self, draft: DSpineForCausalLM, *, compares: bool) -> None:
        self.draft, self.compares, self.replays = draft, compares, 0
        self.mask = torch.tensor([draft.mask_token_id], device="cuda")
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}

    def __call__(self, draft_model: Any, inputs: dict[str, Any], attention: Any, metadata: Any) -> Tensor:
        values = [inputs[name] for name in ("first_prev_tokens", "num_ctx_per_req", "ctx_cache_batch_idx")]
        batch = values[0].shape[0]
        if batch not in self.graphs:
            self.graphs[batch] = self._capture(inputs, values)
        graph, places, captured = self.graphs[batch]
        for place, value in zip(places, values, strict=True):
            place.copy_(value)
        graph.replay()
        self.replays += 1
        logits = captured.clone()
        if self.compares:
            assert torch.equal(logits, self._step(inputs, *values)), f"replay {self.replays}, batch {batch}"
        return logits.argmax(-1)

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
            logits = self._step(inputs, *places)
        return graph, places, logits

    def _step(self, inputs: dict[str, Any], anchors: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        draft, batch, width = self.draft, anchors.shape[0], self.draft.block_size
        embedded = draft.model.embed_tokens(torch.cat((anchors, self.mask)))
        noise = embedded[-1].expand(batch, width, -1)
        caches = {name: inputs[name] for name in ("ctx_k_cache", "ctx_v_cache", "ctx_kv_cache", "ctx_page_table")}
        hidden = draft.dflash_forward(noise, lengths[:, None], lengths, ctx_cache_batch_idx=rows, **caches)
        states = hidden.view(batch, width, -1)[:, 1:].flatten(0, 1)
        logits = draft.logits_processor(states, draft.lm_head, None, True).view(batch, width - 1, -1)
        return draft.apply_markov_chain_logits(logits, anchors)


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


def check_replays(loop: ServingLoop) -> None:
    assert loop.worker.draft.replays == 7
    assert sorted(loop.worker.draft.graphs) == [1, 2, 3]


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("backend", ["VANILLA", "TRTLLM"])
def test_kernels(gpu_loop: Callable[..., ServingLoop], shared_bundle: Bundle, backend: str, graphed: bool) -> None:
    loop = gpu_loop(shared_bundle, "torch", backend)
    assert type(loop.draft_model.executor).__name__ == "KernelBlock"
    if graphed:
        loop.worker.draft = GraphedDrafts(loop.draft_model, compares=False)
    torch.cuda.synchronize()
    started = time.monotonic()
    blocks = serve(loop)
    seconds = time.monotonic() - started
    print(
        f"\nkernels, {backend}, {'graph' if graphed else 'eager'}: {blocks} blocks equal to the reference, {seconds:.1f} s"
    )
    assert blocks == 17
    if graphed:
        check_replays(loop)


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
    """Through `choose_engine` and the manifest checks, as at a server's start: what the plan itself returns, bit for bit.

    Every token is the reference's too, unless the user lets TF32 in: then choices within the published deviation may differ.
    """
    loop = gpu_loop(plan_bundle, "plan", backend)
    block = loop.draft_model.executor
    assert isinstance(block, PlanBlock)
    direct = DirectRuns(loop.worker.draft, loop.draft_model, block.session, PROFILE["context"][2])
    loop.worker.draft = direct
    serve_judged(loop, f"plan, {backend}, eager")
    assert direct.compared == 17


def test_plan_in_a_graph(
    gpu_loop: Callable[..., ServingLoop], plan_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay equals eager, with graphs of other batch sizes captured from the same plan in between."""
    monkeypatch.setattr(PlanRunner, "_new_context", new_context_of_settled_kernels)
    loop = gpu_loop(plan_bundle, "plan", "VANILLA")
    loop.worker.draft = GraphedDrafts(loop.draft_model, compares=True)
    serve_judged(loop, "plan, VANILLA, graph")
    check_replays(loop)


def serve_judged(loop: ServingLoop, label: str) -> None:
    judge = loop.judge = Undecided(loop.reference.lm_head, published_deviation())
    assert serve(loop) == judge.blocks == 17
    print(f"\n{label}, {VARIABLE}={os.environ.get(VARIABLE)}: {judge}")
    if os.environ.get(VARIABLE) == OFF:
        assert judge.different == 0, judge


def new_context_of_settled_kernels(runner: PlanRunner) -> Any:
    """TensorRT-RTX otherwise starts with general kernels and changes over to special ones in the background, in eager runs only."""
    engine, module = runner._engine, runner._backend.module
    config = engine.create_runtime_config()
    config.dynamic_shapes_kernel_specialization_strategy = module.DynamicShapesKernelSpecializationStrategy.EAGER
    return engine.create_execution_context(config)
