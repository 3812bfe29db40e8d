"""The transition cache and the walk through the candidate lattice."""

from dspine_kernels.transition.kernel import TransitionScratch, fold_scores, transition_scores
from dspine_kernels.transition.reference import lattice_walk_reference, transition_scores_reference
from dspine_kernels.transition.walk import lattice_walk, walk_choices

__all__ = [
    "TransitionScratch",
    "fold_scores",
    "lattice_walk",
    "lattice_walk_reference",
    "transition_scores",
    "transition_scores_reference",
    "walk_choices",
]
