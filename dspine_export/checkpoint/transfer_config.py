"""The transfer space a drafter was trained with: its sizes, and whether its codes may be rebuilt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspine_export.checkpoint.config import PROBE_COMPONENTS, PROBE_ROWS, Layout, TransferConfig, TransferProbe
from dspine_export.checkpoint.raw_config import RawProbe, parse_raw_transfer
from dspine_export.errors import CheckpointError

REFERENCE_TOP_K = 16


def parse_transfer(
    flat: Mapping[str, Any], layout: Layout, shapes: Mapping[str, tuple[int, ...]], where: str
) -> TransferConfig | None:
    """Sizes and declarations of the transfer space: from `dspine_config`, or from shapes in the reference layout; None for DFlash."""
    if layout == "dflash":
        return None
    if layout == "reference":
        readout, message = shapes.get("injection.readouts.0.weight"), shapes.get("injection.message.weight")
        if readout is None or message is None or len(readout) != 2 or len(message) != 2:
            raise CheckpointError(
                "Reference layout without its injection tensors",
                where=where,
                expected="injection.readouts.0.weight [r, d] and injection.message.weight [m, r], which state r and m",
            )
        return TransferConfig(rank=readout[0], message_size=message[0], top_k=REFERENCE_TOP_K)
    raw, extra = parse_raw_transfer(flat["dspine_config"], where)
    probe = (
        None
        if raw.transfer_probe is None
        else _probe(raw.transfer_probe, raw.transfer_rank, int(flat["vocab_size"]), where)
    )
    return TransferConfig(raw.transfer_rank, raw.message_size, raw.top_k, raw.transfer_basis, probe, extra)


def _probe(raw: RawProbe, rank: int, vocab_size: int, where: str) -> TransferProbe:
    rows, width = min(PROBE_ROWS, vocab_size), min(PROBE_COMPONENTS, rank)
    ids = raw.token_ids
    good = len(ids) == len(raw.components) == rows and len(set(ids)) == rows and max(ids) < vocab_size
    if not good or any(
        len(row) != width or not all(-1.0001 <= value <= 1.0001 for value in row) for row in raw.components
    ):
        raise CheckpointError(
            "Bad transfer_probe",
            where=f"{where}: dspine_config.transfer_probe",
            expected=f"token_ids: {rows} distinct ids below {vocab_size}; components: {rows} rows of {width} numbers within [-1, 1]",
        )
    return TransferProbe(ids, raw.components)


def check_transfer_sizes(transfer: TransferConfig, hidden_size: int, vocab_size: int, where: str) -> None:
    """K candidates must exist, and the whitened head has at most min(d, V - 1) directions."""
    if transfer.top_k > vocab_size:
        raise CheckpointError(
            "top_k exceeds the vocabulary", where=where, got=transfer.top_k, expected=f"at most {vocab_size}"
        )
    limit = min(hidden_size, vocab_size - 1)
    if transfer.rank > limit:
        raise CheckpointError(
            "transfer_rank is too large", where=where, got=transfer.rank, expected=f"at most min(d, V - 1) = {limit}"
        )
