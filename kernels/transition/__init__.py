"""The transition cache and the walk through the candidate lattice."""

from dspine_kernels.transition.kernel import lattice_walk, transition_scores
from dspine_kernels.transition.reference import lattice_walk_reference, transition_scores_reference

__all__ = ["lattice_walk", "lattice_walk_reference", "transition_scores", "transition_scores_reference"]
