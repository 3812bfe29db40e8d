"""Our kernels as an executor: every draft pass and every append is one CUDA graph over static buffers.

Nothing in the loop allocates device memory or waits for the device: lengths live there, batches are padded to captured sizes with an
always empty slot, and a state is a list of slots of one pool, so that sequences are selected without copying their caches. Graphs are
captured at first use of a size and again after the pool had to grow.

One executor belongs to one thread. On the CPU, under Triton's interpreter, the same code runs without graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspine_export.errors import UsageError
from dspine_export.model.drafter import Drafter
from dspine_export.model.output import DraftOutput
from dspine_export.runtime.batch_buckets import batch_bucket, token_bucket
from dspine_export.runtime.captured_pass import CapturedPass, upload, upload_list
from dspine_export.runtime.cuda_arguments import check_append, check_draft, host_counts
from dspine_export.runtime.kernel_pass import CacheView
from dspine_export.runtime.pass_factory import PassFactory, WeightFormat
from dspine_export.runtime.slot_pool import SPARE, Slot, SlotPool
from dspine_export.runtime.slot_rows import Rows, row_list

MAX_APPEND_ROWS = 2048  # bounds the static buffer of a prompt's hidden states


class CudaState:
    """Sequences in slots of the executor's pool. `lengths` int64 [N] on the device."""

    def __init__(self, pool: SlotPool, slots: list[Slot]) -> None:
        self._pool, self.slots = pool, slots
        self._index = torch.tensor([slot.index for slot in slots], device=pool.lengths.device)
        self._asked: tuple[Sequence[int], tuple[int, ...]] | None = None

    @property
    def batch(self) -> int:
        return len(self.slots)

    @property
    def lengths(self) -> Tensor:
        return self._pool.lengths[self._index]

    @property
    def capacity(self) -> int:
        return self._pool.capacity

    def indices(self, rows: Rows) -> tuple[int, ...]:
        """Pool slots of these rows."""
        # A round asks several times, and the next one most often for the same rows.
        if self._asked is not None and isinstance(rows, list) and rows == self._asked[0]:
            return self._asked[1]
        chosen = row_list(rows, self.batch)
        slots = self.slots if chosen is None else [self.slots[row] for row in chosen]
        found = tuple(slot.index for slot in slots)
        if isinstance(rows, list):
            self._asked = list(rows), found
        return found


class CudaExecutor:
    """A `DrafterExecutor` over `kernel_pass`; dtype and device are those of the tensors the drafter was bound to.

    Values that only the device knows are not checked there: counts and anchors are clamped to what cannot fault.

    Args:
        weights: ``fp8`` rounds the large matrices (`fp8_weights`).
    """

    name = "torch"
    max_context: int | None = None
    max_batch: int | None = None
    attends_capacity = False

    def __init__(self, drafter: Drafter, weights: WeightFormat = "full") -> None:
        self.config = drafter.config
        self._device = drafter.embed_tokens.device
        self._pool = SlotPool(self.config, drafter.embed_tokens)
        self._passes = PassFactory(drafter, self._positions, weights)
        self._generation = self._pool.generation
        self._drafts: dict[int, _Draft] = {}
        self._appends: dict[tuple[int, int], _Append] = {}

    @property
    def _positions(self) -> int:
        return self._pool.capacity + self.config.block_size

    def new_state(self, batch: int, capacity: int = 0) -> CudaState:
        if batch < 1:
            raise UsageError("A cache needs at least one slot", where="new_state", got=batch)
        return CudaState(self._pool, self._pool.take(batch, capacity))

    def new_slots(self, slots: int, context_capacity: int = 0) -> CudaState:
        return self.new_state(slots, context_capacity)

    @torch.no_grad()
    def append_context(self, state: CudaState, target_hidden: Tensor, counts: Tensor, rows: Rows = None) -> None:
        slots = state.indices(rows)
        check_append(self.config, len(slots), target_hidden, counts)
        total = target_hidden.shape[1]
        self._pool.advance(slots, host_counts(counts, total))
        self._refresh()
        bucket, start = batch_bucket(len(slots)), 0
        while start < total:
            tokens = token_bucket(total - start, self.config.block_size, bucket, MAX_APPEND_ROWS)
            append = self._append(bucket, tokens)
            append.run(slots, target_hidden[:, start : start + tokens], counts, start)
            start += tokens

    @torch.no_grad()
    def draft_from(
        self, state: CudaState, anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor, rows: Rows = None
    ) -> DraftOutput:
        """As the protocol says; the output are views of buffers that the next draft of this executor overwrites."""
        slots = state.indices(rows)
        check_draft(self.config, len(slots), anchor_ids, temperature, uniforms)
        self._refresh()
        bucket = batch_bucket(len(slots))
        return self._draft(bucket).run(slots, anchor_ids, temperature, uniforms)

    @torch.no_grad()
    def truncate(self, state: CudaState, lengths: Tensor, rows: Rows = None) -> None:
        """Lengths beyond the current ones change nothing; on the host they are refused where they are known to be wrong."""
        slots = state.indices(rows)
        if lengths.shape != (len(slots),) or lengths.is_floating_point():
            raise UsageError("One length per row", where="truncate", got=list(lengths.shape), expected=[len(slots)])
        if lengths.device.type == "cpu":
            if bool((lengths < 0).any()):
                raise UsageError("Negative length", where="truncate", got=lengths.tolist(), expected="0 and more")
            for slot, length in zip(slots, lengths.tolist(), strict=True):
                self._pool.bound(slot, length)
        index, wanted = (torch.empty(len(slots), dtype=torch.int64, device=self._device) for _ in range(2))
        upload_list(index, slots)
        upload(wanted, lengths)
        wanted = wanted.clamp_min_(0).minimum(self._pool.lengths.index_select(0, index))
        self._pool.lengths.index_copy_(0, index, wanted)

    def at_most(self, state: CudaState, lengths: Sequence[int], rows: Rows = None) -> None:
        """Keeps the pool from reading lengths back when its own bounds, which grow by whole blocks, meet its capacity."""
        for slot, length in zip(state.indices(rows), lengths, strict=True):
            self._pool.bound(slot, length)

    def reset(self, state: CudaState, rows: Rows = None) -> None:
        slots = state.indices(rows)
        self.truncate(state, torch.zeros(len(slots), dtype=torch.int64), rows)

    def select(self, state: CudaState, rows: Rows) -> CudaState:
        """These sequences, in this order, in the slots that they have."""
        chosen = row_list(rows, state.batch)
        return CudaState(self._pool, state.slots if chosen is None else [state.slots[row] for row in chosen])

    def view(self) -> CacheView:
        """The pool as the passes read it."""
        return CacheView(self._pool.keys, self._pool.values, self._pool.lengths)

    # Buffers made inside inference mode could not be written outside it.
    @torch.inference_mode(False)
    def _append(self, batch: int, tokens: int) -> _Append:
        if (batch, tokens) not in self._appends:
            self._appends[batch, tokens] = _Append(self._passes, self.view(), batch, tokens)
        return self._appends[batch, tokens]

    @torch.inference_mode(False)
    def _draft(self, batch: int) -> _Draft:
        if batch not in self._drafts:
            self._drafts[batch] = _Draft(self._passes, self.view(), batch)
        return self._drafts[batch]

    @torch.inference_mode(False)
    def _refresh(self) -> None:
        """Drops what was captured over a pool that has moved; longer contexts also need longer rotation tables."""
        if self._generation == self._pool.generation:
            return
        self._drafts.clear()
        self._appends.clear()
        gc.collect()  # a pass and its steps refer to each other, and with them to the caches that were
        self._generation = self._pool.generation
        self._passes.reach(self._positions)


class _Rows:
    """Which slots a pass's buffers point at; written only when they change."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._slots = buffer, ()
        buffer.fill_(SPARE)

    _slots: tuple[int, ...]

    def point_at(self, slots: tuple[int, ...]) -> bool:
        """True if they changed; the rest of the batch is padding."""
        if slots == self._slots:
            return False
        upload_list(self._buffer, slots + (SPARE,) * (len(self._buffer) - len(slots)))
        self._slots = slots
        return True


class _Append:
    """The captured append of `tokens` rows for up to `batch` sequences."""

    def __init__(self, passes: PassFactory, cache: CacheView, batch: int, tokens: int) -> None:
        self._pass = passes.append(cache, tokens, batch)
        self._rows = _Rows(self._pass.slots)
        self._captured = CapturedPass(self._pass.launch, passes.device)

    def run(self, slots: tuple[int, ...], hidden: Tensor, counts: Tensor, start: int) -> None:
        """hidden [N, T, A*d] are rows `start` and on of an append of counts[n] rows."""
        n, width = hidden.shape[:2]
        if self._rows.point_at(slots):
            self._pass.counts.zero_()
        upload(self._pass.target_hidden[:n, :width], hidden)
        taken = self._pass.counts[:n]
        upload(taken, counts)
        taken.sub_(start).clamp_(0, width)
        self._captured.run()


class _Draft:
    """The captured draft pass of up to `batch` sequences."""

    def __init__(self, passes: PassFactory, cache: CacheView, batch: int) -> None:
        self._pass = passes.draft(cache, batch)
        self._rows = _Rows(self._pass.slots)
        self._last_id = passes.config.vocab_size - 1
        self._dspine = passes.config.is_dspine
        self._captured = CapturedPass(self._pass.launch, passes.device)

    def run(self, slots: tuple[int, ...], anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor) -> DraftOutput:
        buffers, n = self._pass, len(slots)
        self._rows.point_at(slots)
        anchors = buffers.anchor_ids[:n]
        upload(anchors, anchor_ids)
        anchors.clamp_(0, self._last_id)
        upload(buffers.temperature[:n], temperature)
        upload(buffers.uniforms[:n], uniforms)
        self._captured.run()
        return self._output(n)

    def _output(self, n: int) -> DraftOutput:
        buffers: Any = self._pass
        tokens = buffers.tokens[:n]
        if not self._dspine:
            return DraftOutput(tokens, tokens)
        candidates = buffers.candidate_ids.view(buffers.batch, tokens.shape[1], -1)[:n]
        return DraftOutput(tokens, candidates[..., 0], candidates, buffers.scores[:n], buffers.q[:n])
