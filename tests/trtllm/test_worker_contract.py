"""The draft model inside TensorRT-LLM's worker: token parity with the specification over whole serving scenarios.

Against the stub unless the real package is importable; then the same tests drive the real worker on the GPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspine_export.bundle import Bundle
from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.errors import UsageError
from dspine_export.model.drafter import Drafter
from dspine_export.trtllm.block_executors import TorchBlock
from dspine_export.trtllm.context_part import context_only
from dspine_export.trtllm.draft_model import DSpineForCausalLM
from dspine_export.trtllm.plan_block import PlanBlock

from .conftest import Package, Tables
from .draft_models import REQUESTS, Head, make_draft_model, make_serving_loop, whole_context
from .worker_loop import Request, ServingLoop

MakeLoop = Callable[..., ServingLoop]


def use_plan(draft: DSpineForCausalLM, bundle: Bundle, tables: Tables, graph: Any) -> None:
    """The real exported graph behind the plan's contract; no plan can run on a CPU."""
    checkpoint = open_checkpoint(bundle.file("drafter"))
    draft.executor = PlanBlock(checkpoint.config, graph, tables.embed_tokens, tables.lm_head, columns=96)
    draft.drafter_network = context_only(checkpoint, tables.embed_tokens)


@pytest.fixture(params=["torch", "plan"])
def executor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_loop(
    package: Package, shared_bundle: Bundle, tables: Tables, reference: Drafter, request: pytest.FixtureRequest
) -> MakeLoop:
    def make(executor: str = "torch", backend: str = "VANILLA") -> ServingLoop:
        draft = make_draft_model(package, shared_bundle, tables, backend=backend)
        if executor == "plan":
            use_plan(draft, shared_bundle, tables, request.getfixturevalue("draft_graph"))
        return make_serving_loop(package, draft, backend, reference)

    return make


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(310), k=length)


@pytest.mark.parametrize("backend", ["VANILLA", "TRTLLM"])
def test_ragged_batch_with_rejections(make_loop: MakeLoop, executor: str, backend: str) -> None:
    """Prompts of different length in one batch; every number of accepted tokens from none to all."""
    loop = make_loop(executor, backend)
    requests = [Request(id=10 + n, tokens=prompt(length, n)) for n, length in enumerate((5, 17, 1))]
    loop.step(prefill=[(request, len(request.tokens)) for request in requests])
    for accepted in ((0, 3, 7), (7, 0, 1), (2, 2, 0), (1, 7, 4)):
        loop.step(generate=list(zip(requests, accepted, strict=True)))
    assert [request.checked_blocks for request in requests] == [4, 4, 4]
    assert [len(request.tokens) for request in requests] == [5 + 4 + 10, 17 + 4 + 12, 1 + 4 + 12]


def test_chunked_context(make_loop: MakeLoop, executor: str) -> None:
    """A long prompt arrives in pieces while another request generates."""
    loop = make_loop(executor)
    running, long = Request(1, prompt(6, 1)), Request(2, prompt(40, 2))
    loop.step(prefill=[(running, 6)])
    loop.step(prefill=[(long, 16)], generate=[(running, 2)])
    loop.step(prefill=[(long, 16)], generate=[(running, 0)])
    loop.step(prefill=[(long, 8)], generate=[(running, 7)])
    loop.step(generate=[(running, 1), (long, 4)])
    loop.step(generate=[(long, 3), (running, 5)])
    assert (running.checked_blocks, long.checked_blocks) == (5, 2)


def test_requests_leave_and_join(make_loop: MakeLoop, executor: str) -> None:
    """Slots are reused by other requests, and a request id by another prompt."""
    loop = make_loop(executor)
    first, second = Request(1, prompt(30, 3)), Request(2, prompt(9, 4))
    loop.step(prefill=[(first, 30), (second, 9)])
    loop.step(generate=[(first, 4), (second, 0)])
    third = Request(3, prompt(3, 5))
    loop.step(prefill=[(third, 3)], generate=[(second, 6)])  # the first one has left
    loop.step(generate=[(third, 2), (second, 1)])
    again = Request(1, prompt(4, 6))
    loop.step(prefill=[(again, 4)], generate=[(second, 3), (third, 0)])
    loop.step(generate=[(again, 7), (third, 7), (second, 7)])
    assert (second.checked_blocks, third.checked_blocks, again.checked_blocks) == (5, 3, 1)


def test_random_schedule(make_loop: MakeLoop) -> None:
    """Twenty steps of chunks, joins, departures and rejections in random order."""
    loop, dice = make_loop("torch"), random.Random(0)
    alive: list[Request] = []
    names = iter(range(100, 200))
    blocks = 0
    for _ in range(20):
        prefill = [
            (request, min(7, len(request.tokens) - request.prefilled)) for request in alive if request.anchor is None
        ]
        if len(alive) < REQUESTS and dice.random() < 0.5:
            alive.append(Request(next(names), prompt(dice.randint(1, 20), dice.randint(0, 999))))
            prefill.append((alive[-1], min(7, len(alive[-1].tokens))))
        generate = [(request, dice.randint(0, 7)) for request in alive if request.anchor is not None]
        if prefill or generate:
            loop.step(prefill=prefill, generate=generate)
        blocks += len(generate)
        alive = [request for request in alive if len(request.tokens) < 60 and dice.random() < 0.9]
    assert blocks > 25


def test_fewer_drafted_tokens_than_the_block(make_loop: MakeLoop, executor: str) -> None:
    """TensorRT-LLM may ask for a shorter draft at run time; the block is causal, so its prefix stays the same."""
    loop = make_loop(executor)
    request = Request(5, prompt(11, 8))
    loop.step(prefill=[(request, 11)])
    loop.step(generate=[(request, 3)])
    draft = loop.draft_model
    states = loop.target.states(request.tokens, 0).flatten(1)[None]
    keys, values = draft._network.keys_values(
        draft._network.context_features(states), torch.arange(len(request.tokens))[None]
    )
    context, length = whole_context(keys, values), torch.tensor([len(request.tokens)])
    hidden = draft.executor.draft(torch.tensor([request.anchor]), context, length)
    logits = draft.logits_processor(hidden[0, 1:4], draft.lm_head, None, True)[None]
    assert draft.executor.refine(logits).argmax(-1)[0].tolist() == request.drafts[:3]


def test_taps_in_another_order(package: Package, shared_bundle: Bundle, tables: Tables) -> None:
    """TensorRT-LLM captures in ascending layer order; a drafter trained with another order gets its columns back."""
    draft = make_draft_model(package, shared_bundle, tables, backend="VANILLA")
    config = replace(draft.drafter_config, target_layer_ids=(5, 1, 3))
    shuffled = DSpineForCausalLM(
        config, draft.model_config, "VANILLA", lambda embed, head: (draft.drafter_network, draft.executor)
    )
    shuffled.load_weights_from_target_model(
        SimpleNamespace(model=SimpleNamespace(embed_tokens=draft.model.embed_tokens), lm_head=draft.lm_head)
    )
    states = torch.randn(4, 3, config.hidden_size)  # in the checkpoint's order: layers 5, 1, 3
    ascending = states[:, [1, 2, 0]]
    assert torch.equal(
        shuffled.project_target_hidden(ascending.flatten(1)), draft.project_target_hidden(states.flatten(1))
    )


def test_logits_are_the_proposal(package: Package, shared_bundle: Bundle, tables: Tables) -> None:
    """At temperature T the worker samples from softmax(logits / T): the transition row of the greedy predecessor, nothing else."""
    draft = make_draft_model(package, shared_bundle, tables, backend="VANILLA")
    block = draft.executor
    assert isinstance(block, TorchBlock)
    config = draft.drafter_config
    keys = torch.zeros(1, config.num_layers, config.num_kv_heads, 4, config.head_dim)
    hidden = block.draft(torch.tensor([7]), whole_context(keys, keys), torch.tensor([0]))
    logits = block.refine(hidden[:, 1:] @ tables.lm_head.T)
    expected = block.drafter.draft_from(block.drafter.new_state(1, 4), torch.tensor([7]))
    assert expected.candidate_ids is not None and expected.transition_scores is not None
    row = 0
    for slot in range(7):
        finite = logits[0, slot].isfinite().nonzero().flatten()
        assert set(finite.tolist()) == set(expected.candidate_ids[0, slot].tolist())
        scores = expected.transition_scores[0, slot, row]
        torch.testing.assert_close(logits[0, slot, expected.candidate_ids[0, slot]], scores, rtol=1e-5, atol=1e-5)
        row = int(scores.argmax())


def test_another_block_width_is_refused(package: Package, shared_bundle: Bundle, tables: Tables) -> None:
    with pytest.raises(UsageError, match=r"(?s)max_draft_len.*got: 4.*expected: 7"):
        make_draft_model(package, shared_bundle, tables, backend="VANILLA", width=5)


def test_unrecorded_anchors_are_an_error(package: Package, shared_bundle: Bundle, tables: Tables) -> None:
    draft = make_draft_model(package, shared_bundle, tables, backend="VANILLA")
    keys = torch.zeros(2, 3, 12, 2, 16)
    with pytest.raises(UsageError, match="embed_tokens"):
        draft.dflash_forward(torch.zeros(1, 8, 64), torch.zeros(1, 8), torch.tensor([0]), keys, keys, torch.tensor([0]))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        pytest.param(lambda t: (t.embed_tokens, t.lm_head[:160]), "sharded", id="sharded head"),
        pytest.param(
            lambda t: (t.embed_tokens, t.lm_head.to(torch.float8_e4m3fn)), "plain matrices", id="quantised head"
        ),
        pytest.param(lambda t: (t.embed_tokens.half(), t.lm_head.half()), "plain matrices", id="float16"),
    ],
)
def test_unfit_targets(package: Package, shared_bundle: Bundle, tables: Tables, weights: Any, message: str) -> None:
    draft = make_draft_model(package, shared_bundle, tables, backend="VANILLA")
    embed, head = (Head(weight, embeds=False) for weight in weights(tables))
    with pytest.raises(UsageError, match=message):
        draft.load_weights_from_target_model(SimpleNamespace(model=SimpleNamespace(embed_tokens=embed), lm_head=head))
