"""Acceptance of one drafter in the real draft-verify loop: per prompt, so that two drafters can be compared on the same prompts.

tau counts committed tokens per verification call, bonus token included; the call that reads the prompt and its token are not counted. What
a call commits beyond the end of an answer is not counted either.

Symbols: N sequences, S = B - 1 predicting slots, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tools.training.data import cut_loops
from tools.training.drafter import TrainDrafter
from tools.training.speculate import Loop
from tools.training.target import Target


@dataclass(frozen=True)
class Decode:
    """One answer. ``covered`` and ``oracle`` look at the calls whose whole block lies inside the answer."""

    answer: list[int]
    calls: int
    committed: int
    kept: list[int]  # [S] calls that kept slot i
    whole: int  # calls whose block lies inside the answer
    covered: list[int]  # [S] of those: slot i's true token is among the K unary candidates
    oracle: int  # of those: summed length of the longest prefix the candidates cover

    def numbers(self, looped: bool) -> dict[str, Any]:
        """The entry without the text, for the result file."""
        return {**{k: v for k, v in asdict(self).items() if k != "answer"}, "tokens": len(self.answer), "looped": looped}


class _Tally:
    """Counts on the device, one row per original sequence; read once at the end."""

    def __init__(self, loop: Loop, room: int) -> None:
        count, slots, self.room = len(loop.ids), loop.size - 1, room
        self.calls, self.committed = (torch.zeros(count, dtype=torch.int64, device=loop.device) for _ in range(2))
        self.kept = torch.zeros(count, slots, dtype=torch.int64, device=loop.device)
        self.text = torch.zeros(count, room + 1, dtype=torch.int64, device=loop.device)  # the last column is waste
        self.finished = torch.zeros(count, dtype=torch.bool, device=loop.device)
        self.starts = loop.lengths.clone()  # position of the first answer token
        self.history: list[tuple[Tensor, Tensor, Tensor]] = []  # sequences, anchors counted from the first answer token, candidates

    def add(self, rows: Tensor, anchors: Tensor, accepted: Tensor, block: Tensor, candidates: Tensor, eos: int) -> None:
        """One call of sequences ``rows``: ``block`` [n, B] holds the kept tokens and the one that follows."""
        going = ~self.finished[rows]
        place = anchors - self.starts[rows]  # index of the anchor in the answer
        slots = torch.arange(block.shape[1], device=block.device)
        valid = slots <= accepted[:, None]
        ends = (block == eos) & valid
        upto = torch.where(ends.any(1), ends.int().argmax(1) + 1, accepted + 1)  # tokens up to an end token
        upto = torch.minimum(upto, self.room - 1 - place).clamp_min(0) * going
        self.calls[rows] += going
        self.committed[rows] += upto
        self.kept[rows] += (slots[:-1] < torch.minimum(accepted, upto)[:, None]) & going[:, None]
        into = torch.where(slots < upto[:, None], place[:, None] + 1 + slots, self.room)  # the last column is waste
        self.text[rows[:, None], into] = block
        live = going & (upto > 0)
        self.history.append((torch.where(live, rows, -1), place, candidates.int()))
        self.finished[rows] |= (ends.any(1) & going) | (place + upto >= self.room - 1)

    def decodes(self, eos: int) -> list[Decode]:
        coverage = self._coverage()
        results = []
        columns = zip(self.text.tolist(), self.calls.tolist(), self.committed.tolist(), self.kept.tolist(), *coverage, strict=True)
        for text, calls, committed, kept, whole, covered, oracle in columns:
            answer = text[: committed + 1]
            results.append(Decode(answer, calls, committed, kept, whole, covered, oracle))
        return results

    def _coverage(self) -> tuple[list[int], list[list[int]], list[int]]:
        slots = self.kept.shape[1]
        whole, oracle = torch.zeros_like(self.calls), torch.zeros_like(self.calls)
        covered = torch.zeros_like(self.kept)
        for rows, place, candidates in self.history:
            inside = (rows >= 0) & (place + slots <= self.committed[rows])
            truth = self.text[rows[:, None], (place[:, None] + 1 + torch.arange(slots, device=rows.device)).clamp_max(self.room)]
            found = (candidates == truth[..., None]).any(-1) & inside[:, None]
            rows = rows.clamp_min(0)
            whole.index_add_(0, rows, inside.long())
            covered.index_add_(0, rows, found.long())
            oracle.index_add_(0, rows, found.long().cumprod(1).sum(1))
        return whole.tolist(), covered.tolist(), oracle.tolist()


@torch.no_grad()
def run_loop(
    target: Target, drafter: TrainDrafter, drafts_by: str, prompts: Sequence[Sequence[int]], temperature: float, sample: bool, room: int
) -> list[Decode]:  # fmt: skip
    """Answer every prompt with at most ``room`` tokens; results in the caller's order. Draws from torch's default generator."""
    eos = target.shape.eos_token_id
    loop = Loop(target, drafter, drafts_by, prompts, room)
    loop.prefill(temperature)
    tally = _Tally(loop, room)
    first = loop.ids.gather(1, loop.lengths[:, None])[:, 0]
    tally.text[:, 0] = first
    tally.finished |= (first == eos) | (room <= 1)
    rows = torch.arange(len(prompts), device=target.device)
    for call in range(room):
        if call % 8 == 0:  # a look at who is done: the rest goes on in smaller batches
            going = ~tally.finished[rows]
            left = int(going.sum())
            if left == 0:
                break
            if left <= 0.7 * len(rows):
                kept = going.nonzero()[:, 0]
                loop.select(kept)
                rows = rows[kept]
        proposal = loop.draft(temperature, sample)
        verdict = loop.judge(proposal, temperature)
        block = torch.cat((proposal.tokens, verdict.following[:, None]), 1)
        block.scatter_(1, verdict.accepted[:, None], verdict.following[:, None])
        tally.add(rows, loop.lengths, verdict.accepted, block, proposal.candidates, eos)
        loop.commit(proposal, verdict, ~tally.finished[rows])
    return tally.decodes(eos)


def looped(answers: Sequence[Sequence[int]]) -> list[bool]:
    """Which answers start to repeat themselves."""
    kept, _ = cut_loops(answers)
    return [len(k) < len(a) for k, a in zip(kept, answers, strict=True)]


def distinct(answers: Sequence[Sequence[int]], longest: int = 4) -> list[float]:
    """Mean over answers of different n-grams over n-grams, for n = 1 .. ``longest``."""
    shares = []
    for n in range(1, longest + 1):
        grams = [[tuple(a[i : i + n]) for i in range(len(a) - n + 1)] for a in answers if len(a) >= n]
        shares.append(round(sum(len(set(g)) / len(g) for g in grams) / max(len(grams), 1), 4))
    return shares
