"""What the frozen token codes give to the start of training and to the shipped configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PROBE_ROWS = 32
PROBE_COMPONENTS = 8


def principal_directions(head: Tensor, rank: int) -> Tensor:
    """The directions behind `dspine_export.model.transfer.transfer_codes`, in the same basis: float64 [r, d] from ``head`` [V, d].

    Readouts start as these rows, so that a hidden state near a token's output embedding already reads out near that token's code.
    """
    rows = head.detach().cpu().double()
    rows = rows / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)
    rows = rows - rows.mean(0)
    _, vectors = torch.linalg.eigh(rows.T @ rows)
    vectors = vectors.flip(1)[:, :rank]
    peaks = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return (vectors * peaks.sign()).T.contiguous()


def transfer_probe(codes: Tensor) -> dict[str, Any]:
    """The leading code components of 32 tokens spread over the vocabulary: what a recomputation must reproduce."""
    ids = torch.linspace(0, codes.shape[0] - 1, PROBE_ROWS).long()
    rows = codes[ids, :PROBE_COMPONENTS].double()
    return {"token_ids": ids.tolist(), "components": [[round(x, 9) for x in row] for row in rows.tolist()]}
