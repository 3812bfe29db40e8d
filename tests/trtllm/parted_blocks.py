"""Judges drafts of an executor whose scores deviate from the specification within published bounds.

A block may part from the specification's only where the specification itself is undecided by that deviation; what follows the parting in
the same block is a consequence. Every parting is kept with its margin, none is hidden, and a wrong layout, which moves scores by whole
units, is not excused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from dspine_export.model.output import DraftOutput
from dspine_export.model.transition import unary_logits

from .worker_loop import Request

RESULT = Path(__file__).parents[2] / "tools" / "results" / "plan_portable_h200.json"


def published_deviation() -> float:
    """The largest score difference measured on plans of the portable graphs, TF32 let in, over the cases whose candidates agree."""
    runs = json.loads(RESULT.read_text(encoding="utf-8"))["runs"]
    cases = [case for run in runs for case in run["cases"]]
    return max(case["largest_score_error"] for case in cases if not case["different_candidates"])


@dataclass(frozen=True)
class Parting:
    """The first differing slot of one block: ``margin`` is by how much the specification prefers its own choice there."""

    request: int
    committed: int
    slot: int
    margin: float

    def __str__(self) -> str:
        return f"request {self.request} after {self.committed} tokens, slot {self.slot + 1}, margin {self.margin:.1e}"


@dataclass
class Undecided:
    """The judge: two scores, each off by the deviation at most, change places where they lie within twice of it.

    Attributes:
        lm_head: the target's head [V, d]; logits of tokens that are no candidates come from it.
        deviation: of one score.
    """

    lm_head: Tensor
    deviation: float
    blocks: int = 0
    tokens: int = 0
    different: int = 0
    partings: list[Parting] = field(default_factory=list)

    def __call__(self, request: Request, specified: DraftOutput) -> None:
        want = specified.tokens[0, : len(request.drafts)].tolist()
        differs = [slot for slot, pair in enumerate(zip(request.drafts, want, strict=True)) if pair[0] != pair[1]]
        self.blocks, self.tokens, self.different = (
            self.blocks + 1,
            self.tokens + len(want),
            self.different + len(differs),
        )
        if not differs:
            return
        slot = differs[0]
        margin = margin_of(specified, self.lm_head, slot, request.drafts[slot])
        parting = Parting(request.id, len(request.tokens), slot, margin)
        assert margin <= 2 * self.deviation, f"{parting}: not explained by scores off by {self.deviation:.1e}"
        self.partings.append(parting)

    def __str__(self) -> str:
        parted = "".join(f"\n    {parting}" for parting in self.partings)
        return (
            f"{self.blocks} blocks, {self.tokens} tokens: {self.different} differ from the reference, in {len(self.partings)} blocks, "
            f"each parting within {2 * self.deviation:.1e}{parted}"
        )


def margin_of(specified: DraftOutput, lm_head: Tensor, slot: int, token: int) -> float:
    """How much the specification must be undecided for ``token`` at the first differing slot of its block.

    The smaller of the two ways there: the token overtakes the chosen one by transition score, or the chosen one drops out of the
    candidates. A token that is no candidate must first become one.
    """
    assert specified.candidate_ids is not None and specified.transition_scores is not None
    assert specified.hidden_states is not None
    ids, chosen = specified.candidate_ids[0], int(specified.tokens[0, slot])
    logits = unary_logits(specified.hidden_states[:, 1 + slot], lm_head)[0]
    inside = logits[ids[slot]]
    best_outside = logits.index_fill(0, ids[slot], float("-inf")).max()
    dropped = float(logits[chosen] - best_outside)
    if token not in ids[slot].tolist():
        return float(inside.min() - logits[token])
    before = place(ids[slot - 1].tolist(), int(specified.tokens[0, slot - 1])) if slot else 0
    scores = specified.transition_scores[0, slot, before]
    overtaken = float(scores[place(ids[slot].tolist(), chosen)] - scores[place(ids[slot].tolist(), token)])
    return min(overtaken, dropped)


def place(ids: Iterable[int], token: int) -> int:
    return list(ids).index(token)
