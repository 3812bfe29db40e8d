"""The checks that a plan gets on a GPU, here with the exported graph in ONNX Runtime: they pass what is right and catch what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dspine_export.bundle import Bundle
from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.model.drafter import Drafter
from dspine_export.trtllm.context_part import context_only
from dspine_export.trtllm.plan_block import PlanBlock

from .conftest import Package, Tables
from .direct_plan import DirectRuns
from .draft_models import make_draft_model, make_serving_loop
from .parted_blocks import Undecided, published_deviation
from .worker_loop import ServingLoop, serve

COLUMNS = 112
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Changed:
    """The graph, fed something else."""

    def __init__(self, graph: Any, change: Change) -> None:
        self.graph, self.change = graph, change

    def run(self, feeds: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = self.graph.run(self.change(feeds))
        return outputs


def short_mantissas(feeds: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ten bits, as TF32 multiplies."""
    return {
        name: ((tensor.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)
        if tensor.dtype == torch.float32
        else tensor
        for name, tensor in feeds.items()
    }


@pytest.fixture
def make_loop(
    package: Package, shared_bundle: Bundle, tables: Tables, reference: Drafter, draft_graph: Any
) -> Callable[..., ServingLoop]:
    def make(backend: str, session: Any = None) -> ServingLoop:
        draft = make_draft_model(package, shared_bundle, tables, backend=backend)
        checkpoint = open_checkpoint(shared_bundle.file("drafter"))
        draft.executor = PlanBlock(
            checkpoint.config, session or draft_graph, tables.embed_tokens, tables.lm_head, COLUMNS
        )
        draft.drafter_network = context_only(checkpoint, tables.embed_tokens)
        return make_serving_loop(package, draft, backend, reference)

    return make


@pytest.fixture
def judge(tables: Tables) -> Undecided:
    return Undecided(tables.lm_head, published_deviation())


@pytest.mark.parametrize("backend", ["VANILLA", "TRTLLM"])
def test_hooks_return_what_the_graph_returns(
    make_loop: Callable[..., ServingLoop], draft_graph: Any, backend: str
) -> None:
    loop = make_loop(backend)
    loop.worker.draft = DirectRuns(loop.worker.draft, loop.draft_model, draft_graph, COLUMNS)
    assert serve(loop) == loop.worker.draft.compared == 17


def test_published_deviation() -> None:
    assert 1e-3 < published_deviation() < 1e-2


def test_rounded_products_part_only_where_undecided(
    make_loop: Callable[..., ServingLoop], draft_graph: Any, judge: Undecided
) -> None:
    loop = make_loop("VANILLA", Changed(draft_graph, short_mantissas))
    loop.judge = judge
    assert serve(loop) == judge.blocks == 17
    print(f"\n{judge}")


WRONG: dict[str, Change] = {
    "keys for values": lambda feeds: {**feeds, "keys": feeds["values"], "values": feeds["keys"]},
    "heads in another order": lambda feeds: {**feeds, "keys": feeds["keys"].flip(2).contiguous()},
    "layers in another order": lambda feeds: {**feeds, "keys": feeds["keys"].flip(1).contiguous()},
    "columns shifted": lambda feeds: {**feeds, "values": feeds["values"].roll(1, dims=3)},
    "one column less": lambda feeds: {**feeds, "context_lengths": (feeds["context_lengths"] - 1).clamp(min=0)},
    "sequences mixed up": lambda feeds: {**feeds, "keys": feeds["keys"].flip(0).contiguous()},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layouts_are_caught(
    make_loop: Callable[..., ServingLoop], draft_graph: Any, judge: Undecided, name: str
) -> None:
    """By either check alone."""
    wrong = Changed(draft_graph, WRONG[name])
    loop = make_loop("VANILLA", wrong)
    loop.judge = judge
    with pytest.raises(AssertionError, match="not explained by scores off by"):
        serve(loop)
    loop = make_loop("VANILLA", wrong)
    loop.judge = lambda request, specified: None
    loop.worker.draft = DirectRuns(loop.worker.draft, loop.draft_model, draft_graph, COLUMNS)
    with pytest.raises(AssertionError, match=r"transition_scores|candidate_ids"):
        serve(loop)
