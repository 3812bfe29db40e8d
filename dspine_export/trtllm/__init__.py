"""TensorRT-LLM: a DSpine drafter as an out-of-tree draft model of its PyTorch runtime. A thin adapter; the maths is in `model`.

What TensorRT-LLM calls things, and what they are here: block width = B (anchor in slot 0), ``max_draft_len`` = B-1, labels are not
shifted (slot i predicts its own position), the "Markov chain" hook is where the transition cache answers. Signatures were checked
against sources of the 1.3.0 and 1.4.0 pre-releases (`signatures`); nothing here was ever run inside the real package.

Importing this package loads neither torch nor tensorrt_llm; `register` does both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspine_export.trtllm.settings import ModuleSettings

__all__ = ["register"]


def register(settings: dict[str, Any] | ModuleSettings, module_file: str | Path) -> None:
    """Make the drafter of a bundle TensorRT-LLM's draft model for ``decoding_type: DSpark``.

    Called by the generated package ``OUT/trtllm/dspine_trtllm`` when TensorRT-LLM imports it.

    Args:
        settings: the generated constants.
        module_file: ``__file__`` of the generated package, from which the bundle is found wherever it was moved to.

    Raises:
        DependencyError: unknown TensorRT-LLM version or hooks that moved, unless allowed. VerificationError: a damaged bundle.
    """
    from dspine_export.trtllm.register import register_bundle

    register_bundle(settings, Path(module_file))
