"""Committed columns of a paged (or slotted) key/value cache in the layout that the attention kernel reads."""

from dspine_kernels.paged.kernel import copy_committed
from dspine_kernels.paged.reference import copy_committed_reference

__all__ = ["copy_committed", "copy_committed_reference"]
