"""Two repairs of Triton's interpreter that vLLM's samplers need. Loaded as a vLLM plugin, so in every process of an engine.

* A mask made with ``&`` from a comparison and an integer is an integer array for numpy, which the memory operations then misread.
* libdevice's ``log1p`` has no interpreter implementation.
"""

import os
from collections.abc import Callable
from typing import Any


def repair() -> None:
    """Apply both repairs once; does nothing unless TRITON_INTERPRET=1."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton import language
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import InterpreterBuilder

    libdevice.log1p = lambda value: language.log(1.0 + value)
    for name, mask_at in (("create_masked_load", 1), ("create_masked_store", 2)):
        method = getattr(InterpreterBuilder, name)
        if not hasattr(method, "with_boolean_mask"):
            setattr(InterpreterBuilder, name, with_boolean_mask(method, mask_at))


def with_boolean_mask(method: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
    """``method(self, *arguments)`` with ``arguments[mask_at]`` cast to bool when it is a mask of integers."""

    def call(self: Any, *arguments: Any) -> Any:
        mask = arguments[mask_at]
        if mask is not None and mask.data.dtype != bool:
            mask.data = mask.data.astype(bool)
        return method(self, *arguments)

    call.with_boolean_mask = True  # type: ignore[attr-defined]
    return call
