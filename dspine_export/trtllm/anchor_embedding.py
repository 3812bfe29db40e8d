"""The embedding TensorRT-LLM's worker calls, which remembers the ids: ``dflash_forward`` receives embeddings only.

The injection needs the anchor *token* of every sequence. The worker embeds [anchors ..., MASK] in one call of
``draft_model_full.model.embed_tokens`` right before ``dflash_forward``, inside the same CUDA graph.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dspine_export.errors import UsageError


class AnchorEmbedding:
    """Forwards everything to the target's embedding module."""

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding
        self._ids: Tensor | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        self._ids = ids
        return self._embedding(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedding, name)

    def take_anchors(self, count: int) -> Tensor:
        """The first ``count`` ids of the last call, int64 [count]; every call serves one draft.

        Raises:
            UsageError: the worker no longer embeds the anchors this way.
        """
        ids, self._ids = self._ids, None
        if ids is None or ids.ndim != 1 or ids.shape[0] not in (count, count + 1):
            got = "no call" if ids is None else f"ids of shape {list(ids.shape)}"
            raise UsageError(
                "TensorRT-LLM did not embed the anchors through the draft model's embed_tokens",
                where="draft_model_full.model.embed_tokens",
                got=got,
                expected=f"{count} anchors and the mask token in one call before dflash_forward",
                fix="use a signature-checked TensorRT-LLM version",
            )
        return ids[:count].long()
