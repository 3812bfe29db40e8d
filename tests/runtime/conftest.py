"""Pairs that are expensive enough to share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dspine_export.runtime.executor import DrafterExecutor
from dspine_export.runtime.load_target import open_target
from dspine_export.runtime.open_executor import open_executor
from dspine_export.runtime.target import TargetExecutor
from tests.runtime.pairs import Pair, write_bigram_pair, write_byte_tokenizer, write_drafter, write_target

Opened = tuple[TargetExecutor, DrafterExecutor]


def opened(pair: Pair, taps: tuple[int, ...]) -> Opened:
    target = open_target(pair.target, taps)
    return target, open_executor("torch", pair.drafter, target.embed_tokens, target.lm_head)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random byte-level pair: drafts are almost always rejected."""
    folder = tmp_path_factory.mktemp("tiny")
    target = write_target(folder / "target", vocab_size=260, eos_token_id=256, initializer_range=0.2)
    write_byte_tokenizer(target)
    return Pair(target, write_drafter(folder / "drafter", target, open_target(target, ()).lm_head))


@pytest.fixture(scope="session")
def tiny(tiny_pair: Pair) -> Opened:
    return opened(tiny_pair, (0, 2))


@pytest.fixture(scope="session")
def bigram(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return opened(write_bigram_pair(tmp_path_factory.mktemp("bigram")), (0,))


@pytest.fixture(scope="session")
def dflash(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    lm_head = open_target(tiny_pair.target, ()).lm_head
    folder: Path = tmp_path_factory.mktemp("dflash") / "drafter"
    write_drafter(folder, tiny_pair.target, lm_head, architectures=["DFlashDraftModel"])
    return opened(Pair(tiny_pair.target, folder), (0, 2))
