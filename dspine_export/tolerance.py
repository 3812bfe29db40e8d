"""The one tolerance table. Tokens are compared for equality everywhere; these bounds are for floats.

A token (or a candidate) may differ from the reference only where the two choices' reference logits lie within `NEAR_TIE`; such cases
are counted and reported, never hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Tolerance:
    """|got - want| <= absolute + relative * |want|, and the relative Frobenius error of a whole tensor."""

    absolute: float
    relative: float
    frobenius: float


TOLERANCES: dict[str, Tolerance] = {
    "float32": Tolerance(absolute=2e-4, relative=2e-4, frobenius=1e-5),
    "bfloat16": Tolerance(absolute=2.5e-1, relative=5e-2, frobenius=2e-2),
}
