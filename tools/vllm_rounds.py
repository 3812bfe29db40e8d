"""Rounds captured from a running vLLM engine, and the same rounds drafted by the torch model.

The recorder sits around the speculator's ``propose``: what goes in is the target's tapped states and positions, what comes out is the
drafted tokens, whatever runs in between (CUDA graphs included). `compare_rounds` gives the states to the eager model. It follows the
engine's own tokens: a slot is compared under the predecessor that the engine chose, so one near-tie is counted once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspine_export.model.drafter import Drafter
from dspine_export.model.output import DraftOutput


@dataclass(frozen=True)
class Round:
    """One drafted block: ``length`` committed tokens precede the anchor; tokens are the engine's drafts."""

    request: str
    length: int
    anchor: int
    tokens: tuple[int, ...]


@dataclass
class Recorder:
    """What was captured so far.

    Attributes:
        states: per request, tapped states by position.
        limit: rounds to keep; the engine is not slowed down after that.
    """

    limit: int
    rounds: list[Round] = field(default_factory=list)
    states: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def attach(self, speculator: Any) -> None:
        """Wraps the instance's ``propose``; keyword and positional calls alike."""
        original = speculator.propose

        def propose(input_batch: Any, *args: Any, **kwargs: Any) -> Tensor:
            drafted: Tensor = original(input_batch, *args, **kwargs)
            if not kwargs.get("dummy_run") and len(self.rounds) < self.limit:
                # As vLLM calls it: metadata, slots, last states, tapped states, sampled, rejected, ...
                self._keep(speculator, input_batch, args[3], args[5], drafted)
            return drafted

        speculator.propose = propose

    def _keep(self, speculator: Any, batch: Any, taps: Sequence[Tensor], rejected: Tensor, drafted: Tensor) -> None:
        states = torch.cat(list(taps), dim=-1)
        positions, starts = batch.positions.tolist(), batch.query_start_loc_np.tolist()
        width = speculator.num_query_per_req
        for row, request in enumerate(batch.req_ids):
            stop = starts[row + 1] - int(rejected[row])
            kept = self.states.setdefault(request, {})
            kept.update({positions[at]: states[at].clone() for at in range(starts[row], stop)})
            anchor = int(speculator.input_buffers.input_ids[row * width])
            self.rounds.append(Round(request, positions[stop - 1] + 1, anchor, tuple(drafted[row].tolist())))

    def complete(self) -> list[Round]:
        """Rounds whose whole context was computed by this engine run; cached prefixes leave no states."""
        return [one for one in self.rounds if all(at in self.states[one.request] for at in range(one.length))]

    def context(self, one: Round) -> Tensor:
        """Tapped states of a round's context, [1, T, A*d]."""
        kept = self.states[one.request]
        return torch.stack([kept[at] for at in range(one.length)]).unsqueeze(0)


@dataclass
class Agreement:
    """Outcome: tokens compared, tokens equal, and of the others how far apart the torch model saw the two choices.

    ``margins`` say how near the torch model was to the engine's choice: differences of its scores over the standard deviation of the
    slot's candidate scores. For a token that is none of its candidates they are of the logits that selected them, and nothing behind it
    in the block is compared; so they are where its own choice would sooner have fallen from the candidates than behind the engine's.
    """

    rounds: int = 0
    tokens: int = 0
    equal: int = 0
    margins: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.equal / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For a report."""
        return {
            "rounds": self.rounds,
            "tokens": self.tokens,
            "equal": self.equal,
            "share": round(self.share, 5),
            "margins_of_differences": [round(margin, 5) for margin in sorted(self.margins, reverse=True)],
        }


@torch.no_grad()
def compare_rounds(drafter: Drafter, recorder: Recorder) -> Agreement:
    """Drafts every complete round with the torch model and compares token by token."""
    found = Agreement()
    for one in recorder.complete():
        context = recorder.context(one).to(drafter.embed_tokens)
        anchor = torch.tensor([one.anchor], device=context.device)
        wanted = drafter.draft(anchor, context, torch.tensor([one.length]), return_intermediates=True)
        _compare(one, wanted, drafter.lm_head, found)
    return found


def _compare(one: Round, wanted: DraftOutput, lm_head: Tensor, found: Agreement) -> None:
    assert (
        wanted.candidate_ids is not None and wanted.transition_scores is not None and wanted.hidden_states is not None
    )
    found.rounds += 1
    candidates, scores, index = wanted.candidate_ids[0].tolist(), wanted.transition_scores[0], 0
    for slot, token in enumerate(one.tokens):
        row = scores[slot, index]
        best = int(row.argmax())
        found.tokens += 1
        if token in candidates[slot] and candidates[slot].index(token) == best:
            found.equal, index = found.equal + 1, best
            continue
        logits = lm_head @ wanted.hidden_states[0, slot + 1]
        among = logits[candidates[slot]]
        if token not in candidates[slot]:
            found.margins.append(float((among.min() - logits[token]) / among.std()))
            return
        index = candidates[slot].index(token)
        logits[candidates[slot]] = float("-inf")
        fallen = float((among[best] - logits.max()) / among.std())
        others = row.clone()
        others[best] = float("-inf")
        behind = float((others.max() - row[index]) / row.std())  # the engine's choice must be the best of what would have been left
        found.margins.append(min(float((row[best] - row[index]) / row.std()), max(fallen, behind)))
