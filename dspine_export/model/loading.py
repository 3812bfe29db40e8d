"""Checkpoint -> model: reads validated tensors, resolves the transfer codes, binds the target's embedding and head."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.checkpoint.load import Checkpoint, check_finite, open_checkpoint
from dspine_export.errors import CheckpointError, DspineWarning, UsageError
from dspine_export.model.drafter import Drafter
from dspine_export.model.drafter_model import DrafterModel
from dspine_export.model.transfer import GRAM_TOLERANCE, gram_difference, recompute_codes

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A validated checkpoint whose weights are still on disk."""

    checkpoint: Checkpoint

    @property
    def config(self) -> DrafterConfig:
        return self.checkpoint.config

    def bind(
        self, *, embed_tokens: Tensor, lm_head: Tensor, check_codes: bool = True, codes: Tensor | None = None
    ) -> Drafter:
        """Reads the weights into the dtype and device of the target's tensors.

        Args:
            embed_tokens, lm_head: the target's [V, d]; float32, bfloat16 (or float64, for reference computations).
            check_codes: compare stored transfer codes with the head (one eigendecomposition) and warn when they differ.
            codes: transfer codes [V, r] that `resolve_codes` gave before for this pair, to save doing it again.

        Raises:
            CheckpointError: the tensors do not fit the drafter, a value on either side is NaN or infinite, or codes must be recomputed
                and may not be.
        """
        _check_bound(self.config, embed_tokens, lm_head)
        check_finite(self.checkpoint)
        model = build_model(self.checkpoint)
        if codes is None:
            codes = resolve_codes(self.checkpoint, lm_head, check=check_codes)
        model.transfer_codes = codes
        model = model.to(device=embed_tokens.device, dtype=embed_tokens.dtype).eval().requires_grad_(False)
        return Drafter(model, embed_tokens.detach(), lm_head.detach())


def load_checkpoint(path: str | Path) -> LoadedCheckpoint:
    """Opens and fully validates a drafter checkpoint directory. See `checkpoint.load` for the layouts.

    Raises:
        UsageError: not a path. CheckpointError: missing, damaged or unsupported.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            "load_checkpoint needs a path", got=repr(path)[:200], expected="the directory of a drafter checkpoint"
        )
    return LoadedCheckpoint(open_checkpoint(Path(path)))


def build_model(checkpoint: Checkpoint) -> DrafterModel:
    """A DrafterModel holding the checkpoint's tensors as stored; transfer codes are left out (see `resolve_codes`)."""
    with torch.device("meta"):
        model = DrafterModel(checkpoint.config)
    model.transfer_codes = None
    state = {name: checkpoint.tensors.read(name) for name in model.state_dict()}
    model.load_state_dict(state, strict=True, assign=True)
    return model


def resolve_codes(checkpoint: Checkpoint, lm_head: Tensor, *, check: bool = True) -> Tensor | None:
    """Stored codes, else recomputed ones where the checkpoint allows it; None for DFlash. [V, r]"""
    transfer = checkpoint.config.transfer
    if transfer is None:
        return None
    if checkpoint.codes is None:
        return recompute_codes(transfer, lm_head)
    codes = checkpoint.tensors.read(checkpoint.codes.name)
    if check:
        warn_of_foreign_codes(codes, lm_head)
    return codes


def warn_of_foreign_codes(codes: Tensor, lm_head: Tensor) -> None:
    """Warns when stored codes [V, r] were not derived from this head [V, d]; costs one eigendecomposition, two where they differ."""
    difference = gram_difference(codes, lm_head, quick=True)
    if not difference <= GRAM_TOLERANCE / 2:  # what is said about a drafter is computed exactly
        difference = gram_difference(codes, lm_head)
    if not difference <= GRAM_TOLERANCE:
        warnings.warn(
            f"transfer_codes do not belong to this lm_head (Gram matrices differ by {difference:.3g}): the drafter was most likely "
            "trained for another target, or the target's head was quantised or fine-tuned since; expect a low acceptance length",
            DspineWarning,
            stacklevel=3,
        )


def _check_bound(config: DrafterConfig, embed_tokens: Tensor, lm_head: Tensor) -> None:
    expected = (config.vocab_size, config.hidden_size)
    for name, tensor in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(
                "Not a tensor with values",
                where=name,
                got=type(tensor).__name__,
                expected=f"a dense tensor {list(expected)}",
            )
        if tuple(tensor.shape) != expected:
            raise CheckpointError(
                "The target's tensor does not fit the drafter",
                where=name,
                got=list(tensor.shape),
                expected=f"{list(expected)} (vocabulary rows, hidden size)",
                fix="bind the embedding and head of the target this drafter was trained for, padded rows included",
            )
        if tensor.dtype not in COMPUTE_DTYPES:
            fix = "convert to bfloat16 or float32: hidden states of the supported targets exceed what float16 can hold"
            raise CheckpointError(
                "Unsupported compute dtype", where=name, got=tensor.dtype, expected=COMPUTE_DTYPES, fix=fix
            )
        if not bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all()):  # aminmax passes NaN on
            raise CheckpointError(
                "The target's tensor holds NaN or infinity",
                where=name,
                fix="the target's file is damaged, or was never trained",
            )
    if (embed_tokens.dtype, embed_tokens.device) != (lm_head.dtype, lm_head.device):
        got = f"{embed_tokens.dtype} on {embed_tokens.device} and {lm_head.dtype} on {lm_head.device}"
        raise CheckpointError(
            "embed_tokens and lm_head differ in dtype or device", got=got, expected="the same for both"
        )
