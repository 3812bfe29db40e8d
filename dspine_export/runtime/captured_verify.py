"""Verification passes of the embedded target as CUDA graphs: one launch instead of some hundred for every block.

A pass is captured for a number of sequences, a number of tokens and a number of attended columns, at the first block that needs it; ids,
positions and cache rows are its inputs, in buffers. A batch runs in the smallest such pass that holds it: rows too many are pointed at
the cache's spare slot, tokens too many lie behind the block, where the next one overwrites them. Attended columns grow by powers of two,
so that short texts do not pay for the whole cache. Plain and speculative decoding take the same passes.

Short pieces of prompts are captured in the same way: reading them layer by layer takes longer to launch than to compute.

On a CPU the same code runs without graphs (tests do); what cannot be captured is left to the caller, with one warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dspine_export.errors import DspineWarning
from dspine_export.runtime.batch_buckets import batch_bucket
from dspine_export.runtime.captured_pass import CapturedPass
from dspine_export.runtime.slot_cache import SlotCache

MOST_TOKENS = 32  # of a block; longer pieces are prompts
MOST_PROMPT_TOKENS, MOST_PROMPT_ROWS = (
    512,
    1024,
)  # of one sequence and of all; beyond, there is more to compute than to launch
FEWEST_COLUMNS = 256


class Rows(Protocol):
    """The sequences of a pass, in slots of a cache."""

    @property
    def storage(self) -> SlotCache | None:
        """The cache, None where it cannot be captured over."""

    @property
    def index(self) -> Tensor:
        """Slots, int64 [N] on the device, once the positions were asked for."""

    def next_positions(self, count: int) -> Tensor:
        """Positions of the next `count` tokens of every row, int64 [N, count]."""

    def reach(self, count: int) -> int:
        """Columns up to the last of `count` more tokens of the longest sequence."""


@dataclass(frozen=True)
class Shape:
    """Sequences, tokens and attended columns of a pass."""

    sequences: int
    tokens: int
    columns: int


@dataclass(frozen=True)
class Sizes:
    """The largest passes: tokens of a sequence, and of all sequences together (0: any number)."""

    tokens: int = MOST_TOKENS
    rows: int = 0


BLOCKS, PROMPTS = Sizes(), Sizes(MOST_PROMPT_TOKENS, MOST_PROMPT_ROWS)


def shape_for(sequences: int, tokens: int, longest: int, capacity: int, most: Sizes = BLOCKS) -> Shape | None:
    """The pass for a block behind at most `longest` committed tokens; None where it is too large, or runs over the cache's end padded."""
    width, batch = 1 << (tokens - 1).bit_length(), batch_bucket(sequences)
    last = longest + width
    if width > most.tokens or (most.rows and batch * width > most.rows) or last > capacity:
        return None
    columns = max(FEWEST_COLUMNS, 1 << (last - 1).bit_length())
    return Shape(batch, width, min(columns, capacity))


class StaticRows:
    """A pass's rows as buffers, with the interface that `ragged_cache.ragged_attention` writes through.

    Queries of heads that share keys are handed to attention as further rows of one head: kernels that take a mask take no groups.
    """

    def __init__(self, storage: SlotCache, shape: Shape, groups: int) -> None:
        self._keys, self._values, self._columns, self._groups = storage.keys, storage.values, shape.columns, groups
        device = storage.keys[0].device
        self.rows = torch.full((shape.sequences,), storage.spare, dtype=torch.int64, device=device)
        self.positions = torch.arange(shape.tokens, device=device).repeat(shape.sequences, 1)
        self.column = torch.arange(shape.columns, device=device)
        self._head = torch.arange(storage.keys[0].shape[1], device=device)
        self._slices = self._head

    def next_positions(self, count: int) -> Tensor:
        """The buffer, int64 [N, T]."""
        assert count == self.positions.shape[1]
        return self.positions

    def begin(self, positions: Tensor) -> Tensor:
        """The mask, bool [N, 1, G*T, C']: key position <= own position, for every query of a group."""
        self._slices = (self.rows[:, None] * len(self._head) + self._head).view(-1)
        return (self.column <= positions.repeat(1, self._groups).unsqueeze(-1)).unsqueeze(1)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores keys and values [N, Hkv, T, D] of one layer; returns the rows' first C' columns [N, Hkv, C', D]."""
        return self._store(self._keys[layer], keys), self._store(self._values[layer], values)

    def _store(self, cache: Tensor, new: Tensor) -> Tensor:
        cache[self.rows[:, None], :, self.positions] = new.transpose(1, 2)
        slots, heads, capacity, size = cache.shape
        # A head's columns are one piece of memory. As rows of a matrix they are copied whole; index_select would go by the number.
        columns = cache.view(slots * heads, capacity * size)[:, : self._columns * size]
        return columns[self._slices].view(-1, heads, self._columns, size)


Forward = Callable[[StaticRows, Tensor], tuple[Tensor, Tensor]]


class _CachePasses:
    """What was captured over one cache.

    The passes run one after the other and keep nothing but what they return: they share memory for intermediate values, and those of
    equal sequences and tokens their results. All of it goes with the cache, since a pool that lost its last graph takes no new one.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.results: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.by_shape: dict[Shape, _Pass] = {}


class _Pass:
    """One captured shape. Its results are overwritten by every run."""

    def __init__(self, forward: Forward, storage: SlotCache, shape: Shape, groups: int, shared: _CachePasses) -> None:
        self._spare, self._size = storage.spare, (shape.sequences, shape.tokens)
        self._results = shared.results
        self.view = StaticRows(storage, shape, groups)
        self.ids = torch.zeros_like(self.view.positions)
        launch = partial(_launch, forward, self.view, self.ids, self._results)
        self._captured = CapturedPass(launch, self.ids.device, shared.pool)
        self._index: Tensor | None = None

    def run(self, index: Tensor, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        n, tokens = ids.shape
        if index is not self._index:  # the same tensor means the same rows: nobody writes into one
            self.view.rows[:n].copy_(index)
            self.view.rows[n:].fill_(self._spare)
            self._index = index
        self.view.positions[:n].copy_(positions)
        self.ids[:n, :tokens].copy_(ids)
        self._captured.run()
        first, hidden = self._results[self._size]
        return first[:n, :tokens], hidden[:n, :tokens]


@torch.inference_mode(False)
@torch.no_grad()
def _launch(
    forward: Forward, view: StaticRows, ids: Tensor, results: dict[tuple[int, int], tuple[Tensor, Tensor]]
) -> None:
    values, (sequences, tokens) = forward(view, ids), ids.shape
    if (sequences, tokens) not in results:  # at the first warm-up: they must not live in the graphs' shared memory
        results[sequences, tokens] = torch.empty_like(values[0]), torch.empty_like(values[1])
    for result, value in zip(results[sequences, tokens], values, strict=True):
        result.copy_(value)


class VerifyGraphs:
    """The captured passes of one target, by cache and shape.

    Args:
        forward: (rows, ids) -> two tensors [N, T, ..]: what is asked of the tokens, and their hidden states. groups: query heads per
            key head. most: larger passes are left to the caller.
    """

    def __init__(self, forward: Forward, groups: int, device: torch.device, most: Sizes = BLOCKS) -> None:
        self._forward, self._groups, self._device, self.most = forward, groups, device, most
        self._passes: WeakKeyDictionary[SlotCache, _CachePasses] = WeakKeyDictionary()
        self.broken = False

    def run(self, rows: Rows, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """What `forward` returns for ids int64 [N, T], valid until the next run; None: not here."""
        storage = rows.storage
        if storage is None or self.broken:
            return None
        shape = shape_for(ids.shape[0], ids.shape[1], rows.reach(0), storage.capacity, self.most)
        found = None if shape is None else self._pass(storage, shape)
        if shape is None or found is None:
            return None
        positions = rows.next_positions(shape.tokens)
        return found.run(rows.index, ids, positions)

    # Buffers made inside inference mode could not be written outside it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _pass(self, storage: SlotCache, shape: Shape) -> _Pass | None:
        if storage not in self._passes:
            self._passes[storage] = _CachePasses(self._device)
        shared = self._passes[storage]
        if shape not in shared.by_shape:
            try:
                shared.by_shape[shape] = _Pass(self._forward, storage, shape, self._groups, shared)
            except RuntimeError as error:
                self.broken = True
                reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
                message = f"The target runs launch by launch, which is slower than a CUDA graph: {reason}"
                warnings.warn(message, DspineWarning, stacklevel=4)
                return None
        return shared.by_shape[shape]
