"""Products of a few rows with large weights, epilogues fused."""

from dspine_kernels.linear.choice import (
    FEW_NARROW_ROWS,
    FEW_ROWS,
    WRITE_PLAN,
    WRITE_ROWS,
    plan_for,
    rounded_plan,
)
from dspine_kernels.linear.kernel import Plan, Workspace, linear
from dspine_kernels.linear.reference import linear_reference

__all__ = [
    "FEW_NARROW_ROWS",
    "FEW_ROWS",
    "WRITE_PLAN",
    "WRITE_ROWS",
    "Plan",
    "Workspace",
    "linear",
    "linear_reference",
    "plan_for",
    "rounded_plan",
]
