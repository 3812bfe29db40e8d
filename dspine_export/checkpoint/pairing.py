"""Does this drafter belong to this target? Sizes, vocabulary, tapped layers and mask id, before anything is built."""

from __future__ import annotations

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.checkpoint.load import Checkpoint
from dspine_export.checkpoint.target import TargetInfo, read_target
from dspine_export.errors import CheckpointError

__all__ = ["TargetInfo", "check_pairing", "read_target"]

_FIX = "pass the target this drafter was trained for"


def check_pairing(checkpoint: Checkpoint, target: TargetInfo) -> list[str]:
    """Refuse a drafter/target pair that cannot work together; returns warnings about pairs that work with a reservation.

    Whether stored transfer codes were derived from *this* lm_head cannot be seen from shapes: the model layer compares Gram matrices.
    """
    config = checkpoint.config
    where = f"{checkpoint.path} with target {target.path}"
    if config.hidden_size != target.hidden_size:
        raise CheckpointError(
            "Drafter and target differ in hidden size",
            where=where,
            got=config.hidden_size,
            expected=target.hidden_size,
            fix=_FIX,
        )
    _check_depth(config, target, where)
    warnings = _check_vocabulary(config, target, where)
    if config.mask_token_id >= target.embed.shape[0]:
        raise CheckpointError(
            "mask_token_id has no embedding in the target",
            where=where,
            got=config.mask_token_id,
            expected=f"below {target.embed.shape[0]}",
            fix=_FIX,
        )
    return warnings


def _check_depth(config: DrafterConfig, target: TargetInfo, where: str) -> None:
    if config.num_target_layers not in (None, target.num_layers):
        raise CheckpointError(
            "Drafter was trained for a target of another depth",
            where=where,
            got=f"num_target_layers {config.num_target_layers}",
            expected=f"{target.num_layers} layers",
            fix=_FIX,
        )
    if max(config.target_layer_ids) >= target.num_layers:
        raise CheckpointError(
            "Tapped layer beyond the target's depth",
            where=where,
            got=f"target_layer_ids {list(config.target_layer_ids)}",
            expected=f"0 to {target.num_layers - 1}",
            fix="pass the target this drafter was trained for (or the ids count from the embedding and are one too high)",
        )


def _check_vocabulary(config: DrafterConfig, target: TargetInfo, where: str) -> list[str]:
    rows = target.vocab_size
    # Padding rows enter the transfer space too, so DSpine codes must cover exactly the rows of the matrix.
    padded = (
        not config.is_dspine
        and config.vocab_size < rows
        and config.vocab_size in (target.config_vocab_size, target.tokenizer_vocab)
    )
    if config.vocab_size != rows and not padded:
        raise CheckpointError(
            "Drafter and target differ in vocabulary",
            where=where,
            got=f"drafter vocab_size {config.vocab_size}",
            expected=f"{rows} (rows of the target's lm_head)",
            fix="pass the drafter's own target, not padded or resized since training" if config.is_dspine else _FIX,
        )
    warnings = []
    if padded:
        warnings.append(f"the target's lm_head is padded from {config.vocab_size} to {rows} rows")
    used = target.tokenizer_vocab
    if used is not None and used < rows:
        warnings.append(
            f"lm_head rows {used}..{rows - 1} have no token; the drafter may propose them, the target rejects them"
        )
    if used is not None and used > rows:
        raise CheckpointError(
            "Target's tokenizer has ids beyond its lm_head",
            where=target.path,
            got=used,
            expected=f"at most {rows}",
            fix=_FIX,
        )
    return warnings
