"""float32 in a plan means float32: TF32 is ruled out by the environment, before TensorRT is loaded.

`BuilderFlag.TF32` alone does not do it: TensorRT-RTX 1.6.1 on compute capability 9.0 multiplies float32 matrices with 10-bit mantissas
whether the flag is set or not, and exactly where NVIDIA_TF32_OVERRIDE is 0 (tools/results/plan_precision_h200.json). The library reads
the variable once when it is loaded and again at every build, so whoever builds or loads a plan must have it.
"""

from __future__ import annotations

import os

VARIABLE = "NVIDIA_TF32_OVERRIDE"
OFF = "0"


def rule_out_tf32() -> None:
    """Set the variable for this process and its children, unless the user has set it. cuBLAS and cuDNN obey it as well."""
    os.environ.setdefault(VARIABLE, OFF)


def tf32_warning() -> str | None:
    """Why float32 results of a plan may deviate in this process; None where the variable says that they must not."""
    value = os.environ.get(VARIABLE)
    if value == OFF:
        return None
    state = "not set" if value is None else f"set to '{value}'"
    return (
        f"{VARIABLE} is {state}: float32 products inside a plan may be rounded to TF32 (10-bit mantissas), and drafted tokens may "
        f"differ from the torch model's where scores are that close; start with {VARIABLE}={OFF} for float32"
    )
