"""Slots of one pool: who owns them, when they grow, and what the host knows of their lengths."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspine_export.errors import DependencyError
from dspine_export.runtime import context_cache
from dspine_export.runtime.batch_buckets import batch_bucket, token_bucket
from dspine_export.runtime.slot_pool import SPARE, SlotPool

CONFIG: Any = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=2)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> SlotPool:
    monkeypatch.setattr(context_cache, "GROWTH_STEP", 8)
    return SlotPool(CONFIG, torch.zeros(1))


def test_growth_keeps_what_is_there(pool: SlotPool) -> None:
    first = pool.take(2, 8)
    index = first[1].index
    pool.keys[index] = 3.0
    pool.lengths[index] = 8
    before = pool.generation
    later = pool.take(3, 20)
    assert pool.generation > before and pool.capacity == 24 and pool.slots == 6
    assert {slot.index for slot in first + later} == {1, 2, 3, 4, 5}, "the spare one is nobody's"
    assert bool((pool.keys[index, :, :, :8] == 3).all()) and bool((pool.keys[index, :, :, 8:] == 0).all())
    assert pool.lengths[index] == 8 and pool.lengths[later[0].index] == 0 and pool.lengths[SPARE] == 0


def test_a_slot_is_handed_on_empty(pool: SlotPool) -> None:
    held = pool.take(2, 4)
    index = held[0].index
    pool.lengths[index] = 4
    del held[0]
    gc.collect()
    before = pool.generation
    assert pool.take(1, 4)[0].index == index and pool.lengths[index] == 0 and pool.generation == before


def test_bounds_are_corrected_before_anything_grows(pool: SlotPool) -> None:
    """Counts known to the device only are taken for the whole block; at the capacity the truth is read once."""
    slot = pool.take(1, 8)[0].index
    before = pool.generation
    for _ in range(4):
        pool.advance([slot], [3])  # at most 3, in truth 1
        pool.lengths[slot] += 1
    assert pool.generation == before and pool.capacity == 8
    pool.lengths[slot] = 7
    pool.bound(slot, 7)
    pool.advance([slot], [3])
    pool.advance([slot], [3])
    assert pool.generation > before and pool.capacity == 16


def test_what_does_not_fit_is_said() -> None:
    pool = SlotPool(CONFIG, torch.zeros(1))
    with pytest.raises(DependencyError, match="does not fit into GPU memory"):
        pool.take(1 << 20, 1 << 40)
    assert pool.slots == 1, "nothing half grown"


def test_buckets() -> None:
    assert [batch_bucket(n) for n in (1, 2, 3, 8, 9, 16, 17, 24, 25, 33, 48, 49, 128, 129)] == [
        1, 2, 4, 8, 16, 16, 24, 24, 32, 48, 48, 64, 128, 192,
    ]  # fmt: skip
    assert [token_bucket(n, 16, 1, 2048) for n in (1, 16, 17, 40, 5000)] == [16, 16, 32, 64, 2048]
    assert token_bucket(500, 16, 64, 2048) == 32 and token_bucket(500, 16, 500, 2048) == 16
