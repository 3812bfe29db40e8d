"""The K largest logits of every row, descending, ties to the lower id."""

from dspine_kernels.topk.kernel import select_candidates, top_candidates
from dspine_kernels.topk.rescore import rescore

__all__ = ["rescore", "select_candidates", "top_candidates"]
