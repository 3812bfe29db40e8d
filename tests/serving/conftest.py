"""Engines over the tiny pairs of tests/runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dspine_export.runtime.prompts import load_tokenizer
from dspine_export.runtime.serving.admission import Limits
from dspine_export.runtime.serving.engine import Engine, EngineSettings
from dspine_export.runtime.serving.slot_models import SlotModels
from tests.runtime.conftest import Opened, bigram, dflash, one_thread, tiny, tiny_pair
from tests.runtime.pairs import Pair

__all__ = ["bigram", "dflash", "one_thread", "tiny", "tiny_pair"]

MAX_SEQ_LEN = 128
Serve = Callable[..., Engine]


@pytest.fixture(scope="session")
def tokenizer(tiny_pair: Pair) -> Any:
    """Bytes are tokens; 256 is the end."""
    return load_tokenizer(tiny_pair.target)


@pytest.fixture(params=["in step", "ahead"])
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether a round is read before the next one is queued, or behind it, as on a GPU."""
    monkeypatch.setattr(SlotModels, "computes_ahead", request.param == "ahead")
    return str(request.param)


@pytest.fixture
def serve(tiny: Opened, tokenizer: Any) -> Iterator[Serve]:
    """Starts an engine over a pair (the tiny one by default); closed after the test."""
    engines: list[Engine] = []

    def start(
        pair: tuple[Any, Any] | None = None,
        *,
        slots: int = 4,
        max_seq_len: int = MAX_SEQ_LEN,
        limits: dict[str, Any] | None = None,
        warm_up: bool = False,
        text: bool = True,
        **settings: Any,
    ) -> Engine:
        target, executor = pair or tiny
        models = SlotModels(target, executor, slots=slots, max_seq_len=max_seq_len, count_near_ties=True)
        asked = Limits(max_seq_len=max_seq_len, **(limits or {}))
        engine = Engine(
            models, tokenizer if text else None, EngineSettings(slots=slots, limits=asked, threads=1, **settings)
        )
        engines.append(engine)
        engine.start(warm_up=warm_up)
        return engine

    yield start
    for engine in engines:
        engine.close()


def random_prompt(seed: int, most: int = 60) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, most, (), generator=generator))
    return torch.randint(0, 256, (length,), generator=generator).tolist()
