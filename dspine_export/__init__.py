"""Compile trained DSpine speculative-decoding drafters to verified ONNX graphs and TensorRT engines.

``load_checkpoint(path).bind(embed_tokens=E, lm_head=W)`` gives the eager torch drafter; importing this package imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspine_export.version import __version__

if TYPE_CHECKING:
    from dspine_export.model.loading import load_checkpoint

__all__ = ["__version__", "load_checkpoint"]


def __getattr__(name: str) -> Any:
    if name == "load_checkpoint":
        from dspine_export.model.loading import load_checkpoint

        return load_checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
