"""Every stream's greedy output is the target's own, whatever runs beside it; sampled output depends on the seed alone."""

from __future__ import annotations

import random
import threading
import time

import pytest

from dspine_export.runtime.generate import generate_plain
from dspine_export.runtime.load_target import open_target
from dspine_export.runtime.lossless import compare_greedy
from dspine_export.runtime.serving.request import Completion, Request
from dspine_export.runtime.serving.slot_models import SlotModels
from tests.runtime.conftest import Opened
from tests.runtime.pairs import BIGRAM_BLOCK, Pair
from tests.runtime.test_generate import walk
from tests.serving.conftest import Serve, random_prompt

TOKENS = 24


def check(pair: Opened, prompt: list[int], completion: Completion, max_tokens: int = TOKENS) -> None:
    compare_greedy(pair[0], prompt, completion.token_ids, max_new_tokens=max_tokens).require_equal(prompt)


@pytest.mark.usefixtures("pace")
def test_streams_that_come_and_go(tiny: Opened, serve: Serve) -> None:
    """16 clients, 4 slots, prompts around the chunk size, random pauses, a third of the requests sampled or cut short."""
    engine = serve(slots=4, chunk_tokens=16)
    done: dict[int, tuple[Request, Completion]] = {}

    def client(number: int) -> None:
        rng = random.Random(number)
        for turn in range(2):
            time.sleep(rng.random() * 0.05)
            key = 10 * number + turn
            request = Request(
                token_ids=random_prompt(key),
                max_tokens=rng.choice((3, 11, TOKENS)),
                temperature=rng.choice((0.0, 0.0, 0.9)),
                num_draft_tokens=rng.choice((None, None, 0, 1)),
            )
            completion = engine.submit(request).result(120)
            if request.temperature == 0:
                done[key] = (request, completion)

    errors: list[BaseException] = []
    threads = [threading.Thread(target=_caught, args=(client, n, errors)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert len(done) > 12 and engine.slots_in_use == 0
    for key, (request, completion) in done.items():  # not before: the target is the engine's
        check(tiny, random_prompt(key), completion, request.max_tokens or 0)


def _caught(run: object, number: int, errors: list[BaseException]) -> None:
    try:
        run(number)  # type: ignore[operator]
    except BaseException as error:
        errors.append(error)


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("kind", ["tiny", "dflash"])
def test_any_number_of_draft_tokens(kind: str, serve: Serve, request: pytest.FixtureRequest) -> None:
    pair: Opened = request.getfixturevalue(kind)
    engine = serve(pair)
    block = pair[1].config.block_size
    prompt = random_prompt(5)
    handles = [
        engine.submit(Request(token_ids=prompt, max_tokens=TOKENS, num_draft_tokens=count)) for count in range(block)
    ]
    for count, completion in enumerate([handle.result(60) for handle in handles]):
        check(pair, prompt, completion)
        statistics = completion.statistics
        assert statistics.draft_tokens <= count * statistics.target_calls
        assert (statistics.drafts > 0) == (count > 0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 50, 512])
def test_chunked_prompts(tiny: Opened, serve: Serve, chunk: int) -> None:
    engine = serve(chunk_tokens=chunk)
    prompts = [random_prompt(seed) for seed in (21, 22, 23)] + [[7] * 50]
    handles = [engine.submit(Request(token_ids=prompt, max_tokens=6)) for prompt in prompts]
    for prompt, completion in zip(prompts, [handle.result(60) for handle in handles], strict=True):
        check(tiny, prompt, completion, 6)


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("few_shapes", [False, True])
def test_full_acceptance_in_every_slot(bigram: Opened, serve: Serve, few_shapes: bool) -> None:
    """The drafter knows the target, so a context appended wrongly, or to another slot, would cost acceptance."""
    engine = serve(bigram, slots=3, max_seq_len=120, text=False)
    engine.models.few_shapes = few_shapes
    rounds = 4
    starts = [3, 11, 40, 5, 8]
    handles = [engine.submit(Request(token_ids=[7, s], max_tokens=1 + rounds * BIGRAM_BLOCK)) for s in starts]
    for start, handle in zip(starts, handles, strict=True):
        completion = handle.result(60)
        assert completion.token_ids == walk(start, 1 + rounds * BIGRAM_BLOCK)
        assert completion.statistics.acceptance_length == BIGRAM_BLOCK
        assert completion.statistics.per_position_rates == [1.0] * (BIGRAM_BLOCK - 1)


@pytest.mark.usefixtures("pace")
def test_target_alone(tiny: Opened, serve: Serve) -> None:
    engine = serve((tiny[0], None))
    completion = engine.submit(Request(token_ids=[5, 6], max_tokens=9)).result(60)
    check(tiny, [5, 6], completion, 9)
    assert completion.statistics.drafts == 0


@pytest.mark.usefixtures("pace")
def test_limits_of_a_compiled_plan(bigram: Opened, serve: Serve) -> None:
    """At most two rows a call, and a context shorter than the text: drafting stops there, for that stream alone."""
    executor = bigram[1]
    executor.max_context, executor.max_batch = 40, 2
    try:
        engine = serve(bigram, slots=5, max_seq_len=120, text=False)
        handles = [engine.submit(Request(token_ids=[s], max_tokens=60)) for s in range(2, 6)]
        long = engine.submit(Request(token_ids=[9] * 39, max_tokens=5))
        for start, handle in zip(range(2, 6), handles, strict=True):
            completion = handle.result(60)
            assert completion.token_ids == walk(start, 60)
            assert 0 < completion.statistics.drafts < completion.statistics.target_calls
        assert long.result(60).statistics.drafts == 0
    finally:
        executor.max_context = executor.max_batch = None


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("few_shapes", [False, True])
def test_output_is_cut_at_the_longest_sequence(tiny: Opened, serve: Serve, few_shapes: bool) -> None:
    engine = serve(max_seq_len=40)
    engine.models.few_shapes = few_shapes  # padding then reaches beyond the cache
    prompt = [9] * 30
    completion = engine.submit(Request(token_ids=prompt, max_tokens=500, ignore_eos=True)).result(60)
    assert completion.finish_reason == "length" and len(completion.token_ids) == 10
    assert completion.token_ids == generate_plain(tiny[0], prompt, max_new_tokens=10, eos_ids=[]).token_ids


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_sampled_tokens_depend_on_the_seed_alone(serve: Serve, top_p: float) -> None:
    engine = serve(slots=6, chunk_tokens=16)

    def sample(seed: int) -> Request:
        return Request(token_ids=[65, 66, 67], max_tokens=20, temperature=0.8, top_p=top_p, seed=seed, ignore_eos=True)

    alone = [engine.submit(sample(seed)).result(60).token_ids for seed in (1, 2, 2**64 - 1)]
    crowd = [engine.submit(Request(token_ids=random_prompt(n), max_tokens=25)) for n in range(4)]
    together = [engine.submit(sample(seed)) for seed in (1, 2, 2**64 - 1)]
    assert [handle.result(60).token_ids for handle in together] == alone
    assert alone[0] != alone[1] != alone[2]
    for handle in crowd:
        handle.result(60)


def test_both_paces_bring_the_same(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, and what was drafted for them: rounds queued behind unread ones know all that matters."""
    done = []
    for ahead in (False, True):
        monkeypatch.setattr(SlotModels, "computes_ahead", ahead)
        engine = serve(slots=3, chunk_tokens=16)
        asked = [(0.0, None), (0.7, None), (0.0, 1), (1.1, 2), (0.9, 0), (0.0, None)]
        handles = [
            engine.submit(
                Request(
                    token_ids=random_prompt(n), max_tokens=5 + 4 * n, temperature=heat, num_draft_tokens=count, seed=n
                )
            )
            for n, (heat, count) in enumerate(asked)
        ]
        found = [handle.result(60) for handle in handles]
        done.append([(one.token_ids, one.finish_reason, one.statistics, one.near_ties) for one in found])
    assert done[0] == done[1]


def test_the_example_of_a_chat(serve: Serve) -> None:
    engine = serve()
    ask = {"max_tokens": 5, "ignore_eos": True}
    by_text = engine.submit(Request(text="hi", chat=True, **ask)).result(60)
    by_messages = engine.submit(Request(messages=[{"role": "user", "content": "hi"}], **ask)).result(60)
    assert by_text.token_ids == by_messages.token_ids
    assert by_text.prompt_tokens == len("user: hi") + 1 + len("assistant: ")


def test_a_target_in_captured_passes(tiny: Opened, tiny_pair: Pair, serve: Serve) -> None:
    """Without a GPU the same passes run uncaptured. Warmed up for every shape; slots that are not neighbours; short and long texts."""
    target = open_target(tiny_pair.target, (0, 2), capture=True)
    engine = serve((target, tiny[1]), slots=3, max_seq_len=230, chunk_tokens=64, warm_up=True)
    assert engine.models.computes_ahead and engine.models._cache.lengths == [0, 0, 0]
    prompts = [random_prompt(seed) for seed in range(5)] + [[7] * 200]
    counts = [3, 30, 9, 24, 1, 25]
    handles = [
        engine.submit(Request(token_ids=prompt, max_tokens=count))
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    for prompt, count, completion in zip(prompts, counts, [handle.result(60) for handle in handles], strict=True):
        check(tiny, prompt, completion, count)
