"""Is speculative greedy output the target's own? Token for token, near-ties counted.

The target scores a block in one pass and single tokens in many; the two differ by rounding. Where the reference's two best logits lie
within `tolerance.NEAR_TIE`, rounding may turn the choice around: such a place is counted, and the comparison goes on behind it along
the output's own branch, so that nothing after a near-tie escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dspine_export.errors import VerificationError
from dspine_export.runtime.generate import generate_plain
from dspine_export.runtime.target import TargetExecutor
from dspine_export.tolerance import NEAR_TIE


@dataclass(frozen=True)
class GreedyComparison:
    """Outcome of one comparison.

    Attributes:
        tokens: tokens compared. near_ties: positions that differ inside a near-tie of the reference.
        first_difference: first position that differs otherwise; None when there is none.
        expected, got: the tokens there, None where one side had ended. lead: logit of the expected one above the other's.
    """

    tokens: int
    near_ties: tuple[int, ...] = ()
    first_difference: int | None = None
    expected: int | None = None
    got: int | None = None
    lead: float = 0.0

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    def require_equal(self, where: object = None) -> None:
        """Raises VerificationError at a difference that no near-tie explains."""
        if not self.equal:
            raise VerificationError(
                "Speculative output differs from the target's own",
                where=f"{where or 'output'}, token {self.first_difference}",
                got=self.got,
                expected=f"{self.expected}, ahead by {self.lead:.3g} (a near-tie is {NEAR_TIE:g})",
            )


def compare_greedy(
    target: TargetExecutor,
    prompt_ids: Sequence[int],
    output: Sequence[int],
    *,
    max_new_tokens: int,
    eos_ids: Iterable[int] | None = None,
    reference: Sequence[int] | None = None,
) -> GreedyComparison:
    """Compares `output`, generated greedily after `prompt_ids`, with what the target generates alone, one token a call.

    Args:
        max_new_tokens, eos_ids: as `output` was generated with; None are the target's own end tokens.
        reference: the target's own output, where the caller has it already.
    """
    ends = target.eos_ids if eos_ids is None else frozenset(eos_ids)
    position = 0
    near_ties: list[int] = []
    while True:
        prefix = [*prompt_ids, *output[:position]]
        if position == 0 and reference is not None:
            wanted = list(reference)
        else:
            wanted = generate_plain(target, prefix, max_new_tokens=max_new_tokens - position, eos_ids=ends).token_ids
        rest = list(output[position:])
        if wanted == rest:
            return GreedyComparison(len(output), tuple(near_ties))
        same = _common_prefix(wanted, rest)
        expected, got = (tokens[same] if same < len(tokens) else None for tokens in (wanted, rest))
        lead = math.inf
        if expected is not None and got is not None:
            lead = _lead(target, [*prefix, *rest[:same]], expected, got)
        if lead > NEAR_TIE:
            return GreedyComparison(len(output), tuple(near_ties), position + same, expected, got, lead)
        near_ties.append(position + same)
        position += same + 1
        if position == max_new_tokens or got in ends:
            return GreedyComparison(len(output), tuple(near_ties))


def _lead(target: TargetExecutor, prefix: Sequence[int], first: int, second: int) -> float:
    """By how much the target prefers token `first` to `second` after `prefix`."""
    logits = target.prefill(target.new_state(1, len(prefix)), [prefix], lambda _hidden, _counts: None)[0]
    return float(logits[first] - logits[second])


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
