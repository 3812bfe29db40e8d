"""Rounds on their way: what is queued when, what a round takes, and anchors that only the device knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dspine_export.runtime.lossless import compare_greedy
from dspine_export.runtime.serving.clock import ModelClock
from dspine_export.runtime.serving.request import Request
from dspine_export.runtime.serving.slot_models import QueuedRound, SlotModels
from dspine_export.runtime.slot_cache import SlotCache
from tests.runtime.conftest import Opened, opened
from tests.runtime.pairs import Pair, write_drafter
from tests.serving.conftest import Serve, random_prompt


def test_a_round_is_queued_before_the_one_before_is_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotModels, "computes_ahead", True)
    engine, calls = serve(), ""
    queue, read = engine.models.queue, QueuedRound.read

    def noted_queue(streams: Any) -> Any:
        nonlocal calls
        calls += "q"
        return queue(streams)

    def noted_read(self: QueuedRound) -> Any:
        nonlocal calls
        calls += "r"
        return read(self)

    monkeypatch.setattr(engine.models, "queue", noted_queue)
    monkeypatch.setattr(QueuedRound, "read", noted_read)
    done = engine.submit(Request(token_ids=[5], max_tokens=9, num_draft_tokens=0)).result(30)
    assert len(done.token_ids) == 9
    assert calls == "q" + 7 * "qr" + "r", "one round a token behind the first; none is queued that must come too late"
    calls = ""
    monkeypatch.setattr(engine._scheduler, "_ahead", False)
    assert (
        engine.submit(Request(token_ids=[5], max_tokens=9, num_draft_tokens=0)).result(30).token_ids == done.token_ids
    )
    assert calls == 8 * "qr"


def test_a_round_s_time_is_from_the_round_before_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("dspine_export.runtime.serving.clock.time.perf_counter", lambda: now)
    clock = ModelClock(torch.device("cpu"))

    def run(before: float, model: float, after: float) -> None:
        nonlocal now
        now += before
        with clock.round(3):
            with clock.section("target"):
                now += model
            now += after

    run(1, 4, 1)  # the first follows nothing
    run(2, 5, 1)
    run(0, 6, 2)
    with clock.section("prefill"):
        now += 100
    run(1, 1, 1)
    clock.rest()
    run(1, 1, 1)
    run(1, 2, 3)
    rounds = [(one.sequences, one.seconds, one.model_seconds) for one in clock.take_rounds()]
    assert rounds == [(3, 8, 5), (3, 8, 6), (3, 6, 2)]
    assert clock.take() == {"prefill": 100, "draft": 0, "target": 19, "append": 0}
    assert clock.take_rounds() == []


def test_positions_the_host_does_not_know() -> None:
    cache = SlotCache(1, (4, 1, 70, 1), torch.zeros(1))
    index, lengths = torch.tensor([1, 3]), torch.tensor([5, 66])
    view = cache.queued_view([1, 3], index, lengths, 68)
    assert view.reach(2) == 70 and view.next_positions(2).tolist() == [[5, 6], [66, 67]]
    assert view.next_positions(4).tolist() == [[5, 6, 7, 8], [66, 67, 68, 69]], "kept inside the cache"
    lengths += 2
    assert view.next_positions(3).tolist()[1] == [68, 69, 69]
    assert view.begin(view.next_positions(1)).shape == (2, 1, 1, 70)


@pytest.fixture(scope="module")
def padded(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory, tiny: Opened) -> Opened:
    """A drafter that knows the target's first 200 tokens."""
    folder: Path = tmp_path_factory.mktemp("padded") / "drafter"
    lm_head = tiny[0].lm_head[:200]
    flash = {"mask_token_id": 199, "target_layer_ids": [0, 2]}
    write_drafter(folder, tiny_pair.target, lm_head, vocab_size=200, dflash_config=flash)
    return opened(Pair(tiny_pair.target, folder), (0, 2))


@pytest.mark.usefixtures("pace")
def test_tokens_the_drafter_does_not_know(padded: Opened, serve: Serve) -> None:
    engine = serve(padded)
    prompts = [random_prompt(seed) for seed in range(6)]
    handles = [engine.submit(Request(token_ids=prompt, max_tokens=30)) for prompt in prompts]
    found = [handle.result(60) for handle in handles]
    assert any(token >= 200 for one in found for token in one.token_ids[:-1])
    for prompt, one in zip(prompts, found, strict=True):
        compare_greedy(padded[0], prompt, one.token_ids, max_new_tokens=30).require_equal(prompt)
        checked = 3 * sum(token < 200 for token in one.token_ids[:-1])
        assert one.statistics.draft_tokens <= checked
