"""Skinny matrix products (16-512 rows) with what surrounds them in a decoder layer fused in."""

from dspine_kernels.linear.kernel import linear
from dspine_kernels.linear.reference import linear_reference

__all__ = ["linear", "linear_reference"]
