"""The transfer space: unit codes of every token, whitened from the target's language-model head.

The eigenvectors' signs, and rotations inside near-degenerate eigenspaces, form a basis that the trained weights depend on. Codes are
therefore recomputed only for a checkpoint that declares the canonical construction below and carries a probe that must come out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspine_export.checkpoint.config import CANONICAL_TRANSFER_BASIS, TransferConfig
from dspine_export.errors import CheckpointError

PROBE_TOLERANCE = 1e-4
GRAM_TOLERANCE = 2e-2
GRAM_SAMPLE = 64
CHUNK_ROWS = 8192


def transfer_codes(lm_head: Tensor, rank: int) -> Tensor:
    """Codes in the canonical basis: everything in float64 on the CPU, eigenvalues descending, each eigenvector's
    largest-magnitude component positive.

    Args:
        lm_head: [V, d]; all rows enter the mean and the scatter, padded and zero rows too.
        rank: r, the number of directions kept.

    Returns:
        float32 [V, r], rows of unit length.

    Raises:
        CheckpointError: rank exceeds the rank of the head's scatter matrix.
    """
    mean, scatter = _moments(lm_head)
    eigenvalues, vectors = _leading_directions(scatter, rank)
    signs = torch.sign(vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True)))
    projection = vectors * signs / eigenvalues.sqrt()
    codes = torch.empty(lm_head.shape[0], rank, dtype=torch.float32)
    for start in range(0, lm_head.shape[0], CHUNK_ROWS):
        rows = (_unit_rows(lm_head[start : start + CHUNK_ROWS]) - mean) @ projection
        codes[start : start + CHUNK_ROWS] = rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    return codes


def _leading_directions(scatter: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The `rank` largest eigenvalues of [d, d], descending, and their eigenvectors [d, rank]."""
    eigenvalues, vectors = torch.linalg.eigh(scatter)
    eigenvalues, vectors = eigenvalues.flip(0)[:rank], vectors.flip(1)[:, :rank]
    floor = float(eigenvalues[0]) * torch.finfo(scatter.dtype).eps * scatter.shape[0]
    if rank > scatter.shape[0] or float(eigenvalues[-1]) <= floor:
        raise CheckpointError(
            "The transfer space has fewer dimensions than transfer_rank asks for",
            where="dspine_config.transfer_rank",
            got=f"rank {rank}, smallest kept eigenvalue {float(eigenvalues[-1]):.3e}",
            expected="every kept eigenvalue of the head's scatter matrix above 0",
            fix="check that --target-model is the model this drafter was trained for",
        )
    return eigenvalues, vectors


def _unit_rows(rows: Tensor) -> Tensor:
    wide = rows.detach().to("cpu", torch.float64)
    return wide / wide.norm(dim=-1, keepdim=True).clamp_min(1e-300)


def _moments(lm_head: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [d] and centred scatter [d, d] of the unit rows, float64, in two passes of bounded memory."""
    vocab, d = lm_head.shape
    mean = torch.zeros(d, dtype=torch.float64)
    for start in range(0, vocab, CHUNK_ROWS):
        mean += _unit_rows(lm_head[start : start + CHUNK_ROWS]).sum(0)
    mean /= vocab
    scatter = torch.zeros(d, d, dtype=torch.float64)
    for start in range(0, vocab, CHUNK_ROWS):
        centred = _unit_rows(lm_head[start : start + CHUNK_ROWS]) - mean
        scatter += centred.T @ centred
    return mean, scatter


def recompute_codes(transfer: TransferConfig, lm_head: Tensor) -> Tensor:
    """Codes of a checkpoint that stores none, checked against its probe. float32 [V, r]

    Raises:
        CheckpointError: the basis is undeclared or unknown, the probe is missing, or the probe does not come out.
    """
    if transfer.basis != CANONICAL_TRANSFER_BASIS or transfer.probe is None:
        raise CheckpointError(
            "The checkpoint stores no transfer_codes and does not say how to recompute them",
            where="dspine_config.transfer_basis, dspine_config.transfer_probe",
            got=f"transfer_basis={transfer.basis!r}, probe {'present' if transfer.probe else 'absent'}",
            expected=f"transfer_basis={CANONICAL_TRANSFER_BASIS!r} and a transfer_probe, or a transfer_codes tensor",
            fix="store transfer_codes in the checkpoint: codes recomputed in another basis silently destroy a drafter",
        )
    codes = transfer_codes(lm_head, transfer.rank)
    error = probe_error(codes, transfer.probe.token_ids, transfer.probe.components)
    if not error <= PROBE_TOLERANCE:
        raise CheckpointError(
            "Recomputed transfer codes do not reproduce the checkpoint's probe",
            where="dspine_config.transfer_probe",
            got=f"largest difference {error:.3e}",
            expected=f"at most {PROBE_TOLERANCE:g}",
            fix="the drafter was most likely trained for another target: pass that target with --target-model",
        )
    return codes


def probe_error(codes: Tensor, token_ids: Sequence[int], components: Sequence[Sequence[float]]) -> float:
    """Largest absolute difference between probed components and the codes' leading components."""
    if max(token_ids) >= codes.shape[0]:
        return float("inf")
    expected = torch.tensor(components, dtype=torch.float64)
    return float((codes[list(token_ids), : expected.shape[1]].double() - expected).abs().max())


def gram_difference(codes: Tensor, lm_head: Tensor, sample: int = GRAM_SAMPLE, *, quick: bool = False) -> float:
    """Largest difference between the Gram matrices of stored and recomputed codes on sampled tokens; basis-free.

    codes [V, r], lm_head [V, d]. Small (below `GRAM_TOLERANCE`) when the codes belong to this head, infinite for a head whose
    scatter has not even r dimensions. Only sampled rows are projected: a Gram matrix needs no others and no canonical signs.

    Args:
        quick: moments in one pass and eigenvectors in float32, on the head's device. Its errors can only add to the difference, so
            a small one settles the matter.
    """
    mean, scatter = _quick_moments(lm_head) if quick else _moments(lm_head)
    try:
        eigenvalues, vectors = _leading_directions(scatter, codes.shape[1])
    except CheckpointError:
        return float("inf")
    rows = torch.linspace(0, codes.shape[0] - 1, min(sample, codes.shape[0])).long()
    projection = (vectors / eigenvalues.sqrt()).to("cpu", torch.float64)
    own = (_unit_rows(lm_head[rows.to(lm_head.device)]) - mean.cpu()) @ projection
    own /= own.norm(dim=-1, keepdim=True).clamp_min(1e-12)
    stored = codes[rows.to(codes.device)].detach().to("cpu", torch.float64)
    return float((stored @ stored.T - own @ own.T).abs().max())


def _quick_moments(lm_head: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [d] float64 and centred scatter [d, d] float32 of the unit rows, on the head's device; sums of chunks in float64."""
    vocab, d = lm_head.shape
    mean, scatter = (torch.zeros(size, dtype=torch.float64, device=lm_head.device) for size in ((d,), (d, d)))
    for rows in lm_head.detach().split(CHUNK_ROWS):
        unit = rows.float()
        unit = unit / unit.norm(dim=-1, keepdim=True).clamp_min(1e-30)  # not in place: `unit` may be the head itself
        mean += unit.sum(0, dtype=torch.float64)
        scatter += unit.T @ unit
    mean /= vocab
    return mean, (scatter - vocab * torch.outer(mean, mean)).float()
