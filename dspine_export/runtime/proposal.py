"""What a round proposes to the target: the first slots of a drafted block, with the distribution they come from."""

from __future__ import annotations

import torch

from dspine_export.model.output import DraftOutput


def first_slots(draft: DraftOutput, width: int) -> DraftOutput:
    """The first `width` slots. A drafter without q (DFlash) drafted greedily: all of its probability is on its token."""
    tokens = draft.tokens[:, :width]
    if draft.candidate_ids is None or draft.q is None:
        certain = torch.ones(*tokens.shape, 1, device=tokens.device)
        return DraftOutput(tokens, tokens, tokens.unsqueeze(-1), None, certain)
    unrefined = draft.unrefined_tokens[:, :width]
    return DraftOutput(tokens, unrefined, draft.candidate_ids[:, :width], None, draft.q[:, :width])
