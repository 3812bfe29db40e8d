"""The arms of the acceptance lab: DSpine, its ancestors and its ablations, as switches of one drafter and one objective.

All arms share the backbone's shape and its initial weights. "bidirectional" is DFlash as published; everything after it is causal. The
ancestors' heads sit on unshifted slots (DSpark's own slots are shifted by one), so that an arm differs from the next in its head only.
Rank 128 tables on both sides hold as many numbers per vocabulary row as DSpine's folded token table [V, 2m] with m = 128.

`LADDER` is what the bar compares. `VARIANTS` are DSpine with a changed recipe, trained on the same blocks and reported beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dspine_export.model.transfer import transfer_codes
from tools.training.codes import principal_directions
from tools.training.drafter import DrafterShape, TrainDrafter
from tools.training.objective import ObjectiveConfig
from tools.training.target import Target


@dataclass(frozen=True)
class Arm:
    """What is trained; ``refine`` also decides how the arm drafts (over the K x K lattice, or slot by slot)."""

    letter: str
    title: str
    causal: bool = True
    inject: bool = False
    refine: bool = False
    align: bool = False
    head: str = ""
    ce_weight: float = 0.1  # the rest is L1
    top_k: int = 0  # candidates, where the arm has its own number
    fade: bool = False  # the alignment loss falls to 0 over the second half of the run
    whole: bool = False  # the refinement learns p itself on the candidates, not p renormalised on them

    @property
    def drafts_by(self) -> str:
        """ "lattice", "markov" or "unary"."""
        return "lattice" if self.refine else self.head or "unary"


ARMS = {
    "a": Arm("a", "DFlash, bidirectional, CE", causal=False, ce_weight=1.0),
    "b": Arm("b", "DFlash, causal, CE + L1"),
    "c": Arm("c", "b + vanilla Markov head (DSpark)", head="markov"),
    "d": Arm("d", "b + candidate selector (DFlash2)", head="selector", refine=True),
    "e": Arm("e", "DSpine", inject=True, refine=True, align=True),
    "f": Arm("f", "DSpine without injection", refine=True, align=True),
    "g": Arm("g", "DSpine without refinement", inject=True, align=True),
    "h": Arm("h", "DSpine without alignment", inject=True, refine=True),
    "k": Arm("k", "DSpine, fading alignment, whole p", inject=True, refine=True, align=True, fade=True, whole=True),
    "l": Arm("l", "k with 64 candidates", inject=True, refine=True, align=True, fade=True, whole=True, top_k=64),
}
LADDER, VARIANTS = "abcdefgh", "kl"


def arm_shape(arm: Arm, base: DrafterShape, head_rank: int) -> DrafterShape:
    """``base`` with the arm's switches."""
    top_k, head_rank = arm.top_k or base.top_k, head_rank if arm.head else 0
    return replace(base, causal=arm.causal, inject=arm.inject, head=arm.head, head_rank=head_rank, top_k=top_k)


def arm_objective(arm: Arm) -> ObjectiveConfig:
    """The public objective with the arm's switches."""
    config = ObjectiveConfig(ce_weight=arm.ce_weight, refine=arm.refine, align=arm.align, whole=arm.whole)
    return config if arm.inject else replace(config, replacement=0.0)


class Starts:
    """Builds freshly initialised drafters of one target; the transfer codes are computed once."""

    def __init__(self, target: Target, rank: int) -> None:
        self.target = target
        self.codes = transfer_codes(target.head, rank).float().to(target.device)
        self.directions = principal_directions(target.head, rank).float()

    def build(self, shape: DrafterShape, seed: int) -> TrainDrafter:
        """The drafter on the target's device; backbone weights depend on the seed and the sizes only, not on the switches."""
        drafter = TrainDrafter(shape, self.codes.cpu())
        torch.manual_seed(seed)  # construction draws numbers too, how many depends on the switches
        drafter.initialise(self.directions)
        with torch.no_grad():  # the head expects hidden states of this scale
            drafter.norm.weight.copy_(self.target.weights["model.norm.weight"])
        drafter = drafter.to(self.target.device)
        drafter.codes = self.codes
        return drafter
