"""The K largest logits of every row, descending, ties to the lower id."""

from dspine_kernels.topk.kernel import select_candidates, top_candidates
from dspine_kernels.topk.shortlist import SHORTLIST, rescore, shortlist

__all__ = ["SHORTLIST", "rescore", "select_candidates", "shortlist", "top_candidates"]
