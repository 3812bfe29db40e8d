"""Which sequence of a client sits in which slot of the drafter's cache, and who must go when slots run out.

Triton forgets an idle sequence without telling the model, so a slot is taken back when its sequence has been idle for long, or has been
idle longest at a time when another one starts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dspine_export.errors import UsageError
from dspine_export.runtime.serving.draws import Draws
from dspine_export.runtime.serving.outcomes import OverloadedError


@dataclass
class Sequence:
    """One client's sequence. `length` counts the committed tokens in its slot; `draws` are its random numbers."""

    slot: int
    length: int
    draws: Draws
    used_at: float


class SequenceTable:
    """Sequences by correlation id, least recently used first.

    Args:
        slots: of the cache. idle_seconds: after which a sequence may be dropped. now: the clock, in seconds.
    """

    def __init__(self, slots: int, idle_seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._free = list(range(slots))
        self._idle_seconds, self._now = idle_seconds, now
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def start(self, correlation_id: int, draws: Draws, busy: Collection[int] = ()) -> Sequence:
        """A new sequence in an empty slot; one of the same id is replaced. `busy` ids cannot be evicted.

        Raises:
            OverloadedError: every slot belongs to a busy sequence.
        """
        self.end(correlation_id)
        self.expire(busy)
        if not self._free:
            victim = next((known for known in self._sequences if known not in busy), None)
            if victim is None:
                fix = "start it later, or serve with a larger max_slots"
                raise OverloadedError("No slot is free for another sequence", got=f"{len(self)} sequences", fix=fix)
            self._evict(victim)
        sequence = Sequence(min(self._free), 0, draws, self._now())
        self._free.remove(sequence.slot)
        self._sequences[correlation_id] = sequence
        return sequence

    def find(self, correlation_id: int) -> Sequence:
        """A sequence started before, which counts as used now. Raises UsageError when it is unknown or was evicted."""
        sequence = self._sequences.get(correlation_id)
        if sequence is None:
            fix = "start it again, with all of its committed tokens"
            got = f"{correlation_id}, never started or dropped as idle"
            raise UsageError("Unknown sequence", where="CORRID", got=got, fix=fix)
        sequence.used_at = self._now()
        self._sequences.move_to_end(correlation_id)
        return sequence

    def end(self, correlation_id: int) -> None:
        """Frees the slot of a sequence; nothing happens where there is none."""
        sequence = self._sequences.pop(correlation_id, None)
        if sequence is not None:
            self._free.append(sequence.slot)

    def expire(self, busy: Collection[int] = ()) -> None:
        """Drops every sequence idle for too long."""
        oldest = self._now() - self._idle_seconds
        for known in [k for k, sequence in self._sequences.items() if sequence.used_at < oldest and k not in busy]:
            self._evict(known)

    def _evict(self, correlation_id: int) -> None:
        self.end(correlation_id)
        self.evicted += 1
