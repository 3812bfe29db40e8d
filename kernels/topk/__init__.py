"""The K largest logits of every row, descending, ties to the lower id."""

from dspine_kernels.topk.kernel import select_candidates, top_candidates

__all__ = ["select_candidates", "top_candidates"]
