"""Which drafter a `config.json` declares, and in which of the accepted layouts it is written.

| layout | recognised by |
|---|---|
| `specforge` | `dspine_config` present |
| `reference` | no `dspine_config`, but injection tensors or a separate codes file; the config may be nested under `config` |
| `dflash` | neither: z-lab, ModelOpt-style and speculators-style DFlash |
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from dspine_export.checkpoint.config import Layout
from dspine_export.errors import CheckpointError

DSPINE = "DSpineDraftModel"
DFLASH = "DFlashDraftModel"
_SUPPORTED = (DSPINE, DFLASH)

# Relatives that share the backbone's tensor names; a near miss in spelling is not what happened there.
_RELATIVES = {
    "DFlash2DraftModel": "DFlash2 adds convolutions and a candidate selector",
    "DSparkDraftModel": "DSpark uses shifted slots and a Markov head",
    "Qwen3DSparkModel": "DSpark uses shifted slots and a Markov head",
    "DominoDraftModel": "Domino adds a recurrent correction head",
    "LiLiCorrDraftModel": "LiLiCorr adds a candidate reranker",
}


def flatten(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Unwrap the nested spellings: the reference's `config`, speculators' `transformer_layer_config`."""
    inner = raw.get("config")
    if "hidden_size" not in raw and isinstance(inner, dict):
        return dict(inner)
    layers = raw.get("transformer_layer_config")
    if layers is None:
        return dict(raw)
    if not isinstance(layers, dict):
        raise CheckpointError("transformer_layer_config is not an object", where=where)
    outer = {key: value for key, value in raw.items() if key != "transformer_layer_config"}
    dropped = {"architectures", "model_type", "num_target_layers"}  # these describe the layer's donor, not the drafter
    return {**{key: value for key, value in layers.items() if key not in dropped}, **outer}


def detect_layout(raw: Mapping[str, Any], tensor_names: Sequence[str], has_codes_file: bool) -> Layout:
    """The layout of a flattened config, given the names of the stored tensors."""
    if raw.get("dspine_config") is not None:
        return "specforge"
    if has_codes_file or any(name.startswith("injection.") for name in tensor_names):
        return "reference"
    return "dflash"


def check_architecture(declared: Sequence[str] | None, layout: Layout, where: str) -> str:
    """The drafter architecture among `declared`, consistent with `layout`.

    A DSpine checkpoint may list serving classes beside its own (`["DSpineDraftModel", "Qwen3DSparkModel"]`); the reference layout may
    carry no name at all, or that of the DFlash config it was derived from.
    """
    names = list(declared or ())
    if layout == "reference":
        unknown = [name for name in names if name not in _SUPPORTED and DSPINE not in names]
        if unknown:
            raise _unknown(unknown[0], where)
        return DSPINE
    if not names:
        raise CheckpointError(
            "Configuration key 'architectures' is missing", where=where, expected=f'["{DSPINE}"] or ["{DFLASH}"]'
        )
    if DSPINE in names:
        if layout == "dflash":
            raise CheckpointError(
                "DSpine drafter without dspine_config and without injection tensors",
                where=where,
                fix=f"if this is a plain causal DFlash drafter, its architecture is {DFLASH}; otherwise the checkpoint is incomplete",
            )
        return DSPINE
    for name in names:
        if name != DFLASH:
            raise _unknown(name, where)
    if layout == "specforge":
        raise CheckpointError("DFlash architecture with a dspine_config", where=where, got=DFLASH, expected=DSPINE)
    return DFLASH


def _unknown(name: str, where: str) -> CheckpointError:
    lowered = {known.lower(): known for known in _SUPPORTED}
    close = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.5)
    if name in _RELATIVES:
        fix = f"{_RELATIVES[name]}, which this exporter does not implement"
    else:
        fix = f"did you mean {lowered[close[0]]!r}?" if close else "pass a DSpine or DFlash drafter"
    return CheckpointError(
        f"Unknown drafter architecture {ascii(name)[:100]}",
        where=f"{where}: architectures",
        expected=" or ".join(_SUPPORTED),
        fix=fix,
    )
