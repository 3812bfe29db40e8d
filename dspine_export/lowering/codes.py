"""Transfer codes of a pair, resolved once: the fused form, the portable form and the verification all need them."""

from __future__ import annotations

from torch import Tensor

from dspine_export.checkpoint.load import Checkpoint
from dspine_export.checkpoint.target import TargetInfo
from dspine_export.errors import BuildError
from dspine_export.model.loading import resolve_codes

_cache: dict[tuple[object, ...], Tensor] = {}


def pair_codes(checkpoint: Checkpoint, target: TargetInfo | None) -> Tensor | None:
    """Stored codes, else codes recomputed from the target's head; None for DFlash. float [V, r]

    Raises:
        BuildError: they must be recomputed and there is no target. CheckpointError: they may not be, or do not come out.
    """
    if checkpoint.config.transfer is None:
        return None
    if checkpoint.codes is not None:
        return checkpoint.tensors.read(checkpoint.codes.name)
    if target is None:
        raise BuildError(
            "The checkpoint stores no transfer_codes, so they must be recomputed from the target's head",
            where="transfer_codes",
            fix="pass --target-model DIR",
        )
    head = target.lm_head
    changed = head.path.stat().st_mtime_ns
    key = (checkpoint.path, repr(checkpoint.config.transfer), head.path, head.offset_bytes, head.shape, changed)
    if key not in _cache:
        _cache.clear()  # one pair at a time: the codes of a large target take hundreds of megabytes
        codes = resolve_codes(checkpoint, target.read_lm_head(), check=False)
        assert codes is not None
        _cache[key] = codes
    return _cache[key]
