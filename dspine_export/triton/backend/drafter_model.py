"""The model `dspine_drafter`: drafts for people who run the target themselves.

Triton's sequence batcher sends the steps of many sequences together; each step commits the tapped states of newly accepted tokens and asks
for the block behind the anchor. Steps that ask for the same thing run in one pass of the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from dspine_export.errors import UsageError
from dspine_export.runtime.executor import DrafterExecutor
from dspine_export.runtime.proposal import first_slots
from dspine_export.runtime.serving.draws import Draws
from dspine_export.runtime.serving.open_engine import open_drafter
from dspine_export.triton.backend.drafter_inputs import DraftRequest, parse_step
from dspine_export.triton.backend.errors import error_response, tensors_response
from dspine_export.triton.backend.parameters import ModelParameters, pair_source
from dspine_export.triton.backend.sequences import Sequence, SequenceTable

Arrays = dict[str, Any]


@dataclass(frozen=True)
class _Step:
    request: DraftRequest
    sequence: Sequence


class DrafterSteps:
    """Steps of sequences over one executor's slots, without Triton.

    Args:
        max_seq_len: most committed tokens of a sequence.
    """

    def __init__(self, executor: DrafterExecutor, slots: int, max_seq_len: int, idle_seconds: float) -> None:
        self.executor, self.config = executor, executor.config
        limit = executor.max_context
        self._room = max_seq_len if limit is None else min(max_seq_len, limit - self.config.block_size)
        self._state = executor.new_slots(slots, self._room)
        self.table = SequenceTable(slots, idle_seconds)

    @torch.inference_mode()
    def run(self, requests: list[DraftRequest]) -> list[Arrays | Exception]:
        """One step of every sequence named; results in the same order. What is wrong with one step is its own result."""
        busy = {request.correlation_id for request in requests}
        results: list[Arrays | Exception] = [UsageError("not run")] * len(requests)
        steps: dict[int, _Step] = {}
        for index, request in enumerate(requests):
            try:
                steps[index] = self._prepare(request, busy)
            except Exception as error:
                results[index] = error
        try:
            self._commit([step for step in steps.values() if step.request.hidden is not None])
            drafted = self._draft([step for step in steps.values() if step.request.anchor is not None])
        except Exception as error:
            return [error if index in steps else results[index] for index in range(len(requests))]
        for index, step in steps.items():
            arrays = drafted.get(step.sequence.slot) or self._nothing()
            results[index] = arrays | {"context_length": np.array([step.sequence.length], dtype=np.int64)}
            if step.request.end:
                self.table.end(step.request.correlation_id)
        return results

    def _prepare(self, request: DraftRequest, busy: set[int]) -> _Step:
        """Finds or starts the sequence and rolls it back as asked. Raises DspineError."""
        if request.start:
            draws = Draws(request.seed, self.config.block_size, greedy=False)
            sequence = self.table.start(request.correlation_id, draws, busy)
            self.executor.reset(self._state, [sequence.slot])
        else:
            sequence = self.table.find(request.correlation_id)
        kept = sequence.length if request.truncate_to is None else request.truncate_to
        if kept > sequence.length:
            expected = f"at most {sequence.length}, the tokens committed"
            raise UsageError("An input is wrong", where="truncate_to", got=kept, expected=expected)
        added = 0 if request.hidden is None else len(request.hidden)
        if kept + added > self._room:
            fix = "serve with a larger max_seq_len, or go on without drafts"
            raise UsageError(
                "The sequence is too long", got=f"{kept + added} tokens", expected=f"at most {self._room}", fix=fix
            )
        if kept < sequence.length:
            self.executor.truncate(self._state, torch.tensor([kept]), [sequence.slot])
            sequence.length = kept
        return _Step(request, sequence)

    def _commit(self, steps: list[_Step]) -> None:
        size = self.executor.max_batch or len(steps)
        for start in range(0, len(steps), size or 1):
            part = steps[start : start + size]
            pieces = [step.request.hidden for step in part]
            hidden = torch.nn.utils.rnn.pad_sequence([piece for piece in pieces if piece is not None], batch_first=True)
            counts = [0 if piece is None else len(piece) for piece in pieces]
            rows = [step.sequence.slot for step in part]
            device = self._state.lengths.device
            self.executor.append_context(self._state, hidden.to(device), torch.tensor(counts), rows)
            for step, count in zip(part, counts, strict=True):
                step.sequence.length += count

    def _draft(self, steps: list[_Step]) -> dict[int, Arrays]:
        """Outputs by slot."""
        found: dict[int, Arrays] = {}
        size, slots = self.executor.max_batch or len(steps), self.config.block_size - 1
        device = self._state.lengths.device
        for start in range(0, len(steps), size or 1):
            part = steps[start : start + size]
            heat = torch.tensor([step.request.temperature for step in part])
            draws = np.stack([step.sequence.draws.round()[:slots] for step in part])
            anchors = torch.tensor([step.request.anchor for step in part])
            rows = [step.sequence.slot for step in part]
            inputs = (anchors.to(device), heat.to(device), torch.from_numpy(draws).to(device))
            draft = first_slots(self.executor.draft_from(self._state, *inputs, rows), slots)
            assert draft.candidate_ids is not None and draft.q is not None
            columns = [tensor.cpu().numpy() for tensor in (draft.tokens, draft.candidate_ids, draft.q)]
            for row, tokens, candidates, q in zip(rows, *columns, strict=True):
                found[row] = {"draft_tokens": tokens, "candidate_ids": candidates, "q": q}
        return found

    def _nothing(self) -> Arrays:
        k = self.config.transfer.top_k if self.config.transfer is not None else 1
        return {
            "draft_tokens": np.zeros(0, dtype=np.int64),
            "candidate_ids": np.zeros((0, k), dtype=np.int64),
            "q": np.zeros((0, k), dtype=np.float32),
        }


class DrafterModel:
    """What `model.TritonPythonModel` becomes for the kind `drafter`. Raises DspineError."""

    def __init__(self, pb_utils: Any, config: dict[str, Any], parameters: ModelParameters) -> None:
        self._pb = pb_utils
        self._batched = int(config.get("max_batch_size", 0)) > 0
        slots, room = parameters.integer("max_slots", 1), parameters.integer("max_seq_len", 1)
        threads = parameters.integer("threads")
        if threads:
            torch.set_num_threads(threads)
        executor = open_drafter(pair_source(parameters))
        self._steps = DrafterSteps(executor, slots, room, parameters.number("idle_seconds"))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Runs one step of every request's sequence."""
        parsed: list[DraftRequest | Exception] = []
        for request in requests:
            try:
                parsed.append(parse_step(partial(self._read, request), self._steps.config))
            except Exception as error:
                parsed.append(error)
        valid = [step for step in parsed if isinstance(step, DraftRequest)]
        results = iter(self._steps.run(valid)) if valid else iter(())
        return [self._response(step if isinstance(step, Exception) else next(results)) for step in parsed]

    def close(self) -> None:
        """Nothing runs between two calls of `execute`."""

    def _response(self, result: Arrays | Exception) -> Any:
        if isinstance(result, Exception):
            return error_response(self._pb, result)
        arrays = {name: array[None] if self._batched else array for name, array in result.items()}
        return tensors_response(self._pb, arrays)

    def _read(self, request: Any, name: str) -> Tensor | None:
        tensor = self._pb.get_input_tensor_by_name(request, name)
        if tensor is None:
            return None
        # DLPack is the one way for bfloat16; empty tensors, flags and unsigned numbers do better without.
        if name == "target_hidden" and all(tensor.shape()):
            value = from_dlpack(tensor.to_dlpack())
        else:
            array = tensor.as_numpy()
            value = torch.from_numpy(array.astype(np.int64) if array.dtype.kind in "ub" else array)
        return value[0] if self._batched and value.ndim > 1 else value
