"""The K largest logits of every row, descending, ties to the lower id."""

from dspine_kernels.topk.kernel import top_candidates

__all__ = ["top_candidates"]
