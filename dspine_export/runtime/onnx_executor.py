"""A bundle's portable graphs in ONNX Runtime, float32 on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import UsageError
from dspine_export.lowering.onnx_session import OnnxSession
from dspine_export.model.output import DraftOutput
from dspine_export.model.state import DraftState
from dspine_export.runtime.executor import CachedExecutor


class OnnxExecutor(CachedExecutor):
    """Runs ``context.onnx`` and ``draft.onnx`` of `folder`.

    Args:
        embed_tokens, lm_head: the target's float32 [V, d] on the CPU; bound as graph inputs, not copied.
    """

    name = "onnxruntime"

    def __init__(self, config: DrafterConfig, folder: Path, embed_tokens: Tensor, lm_head: Tensor) -> None:
        if embed_tokens.device.type != "cpu" or embed_tokens.dtype != torch.float32:
            raise UsageError(
                "The portable graphs run in float32 on the CPU",
                where="executor onnxruntime",
                got=f"a target in {embed_tokens.dtype} on {embed_tokens.device}",
                fix="open the target with --dtype float32 --device cpu, or choose another executor",
            )
        super().__init__(config, embed_tokens)
        self._context, self._draft = OnnxSession(folder / "context.onnx"), OnnxSession(folder / "draft.onnx")
        self._tables = {"embed_tokens": embed_tokens.contiguous(), "lm_head": lm_head.contiguous()}

    def project(self, target_hidden: Tensor, start_positions: Tensor) -> tuple[Tensor, Tensor]:
        out = self._context.run({"target_hidden": target_hidden, "start_positions": start_positions})
        return out["new_keys"], out["new_values"]

    @torch.no_grad()
    def draft(self, state: DraftState, anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor) -> DraftOutput:
        feeds = {"anchor_ids": anchor_ids, "context_lengths": state.lengths, "keys": state.keys, "values": state.values}
        out = self._draft.run(feeds | {"temperature": temperature, "uniforms": uniforms} | self._tables)
        return draft_output(out)


def draft_output(out: dict[str, Tensor]) -> DraftOutput:
    """The draft entry's named outputs as a `DraftOutput`; a DFlash graph has the two token tensors only."""
    return DraftOutput(
        out["tokens"],
        out["unrefined_tokens"],
        out.get("candidate_ids"),
        out.get("transition_scores"),
        out.get("q"),
    )
