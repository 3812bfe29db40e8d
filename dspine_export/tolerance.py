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


# float32 leaves room for hidden sizes and activations of real models; the golden cases stay below 2e-5 and 1e-6. bfloat16 is about
# twice the golden cases' error, most of which is the rounding of their float32 weights.
TOLERANCES: dict[str, Tolerance] = {
    "float32": Tolerance(absolute=2e-4, relative=2e-4, frobenius=1e-5),
    "bfloat16": Tolerance(absolute=2.5e-1, relative=2e-2, frobenius=2.5e-2),
}
