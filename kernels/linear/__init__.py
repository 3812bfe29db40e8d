"""Products of a few rows with large weights, epilogues fused."""

from dspine_kernels.linear.choice import plan_for
from dspine_kernels.linear.kernel import Plan, Workspace, linear
from dspine_kernels.linear.reference import linear_reference

__all__ = ["Plan", "Workspace", "linear", "linear_reference", "plan_for"]
