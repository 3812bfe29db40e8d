"""Attention choices that leave no trace in the tensors: in-block mask, windows and rotary embedding. Guessing them is silently wrong."""

from __future__ import annotations

from typing import Any

from dspine_export.checkpoint.architectures import DSPINE
from dspine_export.checkpoint.config import FULL_ATTENTION, SLIDING_ATTENTION, Layout
from dspine_export.checkpoint.raw_config import RawConfig
from dspine_export.errors import CheckpointError

# z-lab's own model code, named by its files: every block slot sees the whole block.
_ZLAB_AUTO_MAP = "dflash.DFlashDraftModel"


def resolve_causality(raw: RawConfig, architecture: str, layout: Layout, where: str, warnings: list[str]) -> bool:
    """Whether block slots attend causally within the block.

    `is_causal` wins over `dflash_config.causal`. DSpine exists in causal form only. A silent DFlash checkpoint is bidirectional when it
    carries z-lab's marker and full attention everywhere (there every known runtime agrees); otherwise its mask is undetermined.
    """
    nested = raw.dflash_config.causal
    declared = raw.is_causal if raw.is_causal is not None else nested
    if raw.is_causal is not None and nested is not None and raw.is_causal != nested:
        warnings.append(f"is_causal={raw.is_causal} overrides dflash_config.causal={nested}")
    if architecture == DSPINE:
        if declared is False:
            raise CheckpointError(
                "DSpine drafter that declares a bidirectional block",
                where=f"{where}: is_causal",
                got="false",
                expected="true: DSpine is only ever trained with a causal block",
                fix="this checkpoint is mislabelled; get the original config.json from its trainer",
            )
        if declared is None and layout == "specforge":
            warnings.append("is_causal is not stated; DSpine is causal by construction")
        return True
    if declared is not None:
        return declared
    zlab = (raw.auto_map or {}).get("AutoModel") == _ZLAB_AUTO_MAP
    if zlab and SLIDING_ATTENTION not in (raw.layer_types or ()) and not raw.dflash_config.use_swa:
        return False
    raise CheckpointError(
        "The in-block attention mask is undetermined",
        where=where,
        got="neither is_causal nor dflash_config.causal",
        expected='"is_causal": true (causal DFlash) or false (bidirectional, as z-lab trains it)',
        fix='add "is_causal" to the drafter\'s config.json; the trainer knows which: the other mask runs, and is silently wrong',
    )


def resolve_windows(
    raw: RawConfig, layout: Layout, where: str, warnings: list[str]
) -> tuple[tuple[str, ...], int | None]:
    """Attention type of every layer and the sliding window in positions (None when no layer slides)."""
    count = raw.num_hidden_layers
    types = raw.layer_types or (FULL_ATTENTION,) * count
    if raw.layer_types is None and raw.use_sliding_window:
        raise CheckpointError(
            "use_sliding_window without layer_types", where=where, fix="list every layer's type in layer_types"
        )
    if len(types) != count:
        raise CheckpointError(
            "layer_types has the wrong length", where=where, got=len(types), expected=f"{count} (num_hidden_layers)"
        )
    unknown = [name for name in types if name not in (FULL_ATTENTION, SLIDING_ATTENTION)]
    if unknown:
        raise CheckpointError(
            "Unknown layer type",
            where=f"{where}: layer_types",
            got=ascii(unknown[0]),
            expected=f"{FULL_ATTENTION} or {SLIDING_ATTENTION}",
        )
    types, window = _apply_use_swa(raw, types, where)
    if SLIDING_ATTENTION not in types:
        return types, None
    if layout == "reference":
        raise CheckpointError(
            "Sliding attention in the reference layout", where=where, expected="full attention, the only kind it trains"
        )
    if window is None:
        raise CheckpointError("sliding_attention without a window", where=where, expected="a positive sliding_window")
    if raw.use_sliding_window is False:
        warnings.append("use_sliding_window is false but layer_types names sliding layers; layer_types decides")
    return types, window


def _apply_use_swa(raw: RawConfig, types: tuple[str, ...], where: str) -> tuple[tuple[str, ...], int | None]:
    """ModelOpt's `dflash_config.use_swa`: all layers slide, although `layer_types` still says full attention."""
    window, nested = raw.sliding_window, raw.dflash_config.swa_window_size
    if not raw.dflash_config.use_swa:
        return types, window
    if window is not None and nested is not None and window != nested:
        raise CheckpointError(
            "sliding_window and dflash_config.swa_window_size disagree", where=where, got=f"{window} and {nested}"
        )
    if SLIDING_ATTENTION not in types:
        types = (SLIDING_ATTENTION,) * len(types)
    return types, window or nested


def resolve_rope_theta(raw: RawConfig, where: str) -> float:
    """Rotary base from the top level, `rope_parameters` or a default-type `rope_scaling`; any real scaling is refused by name."""
    thetas: dict[str, float] = {} if raw.rope_theta is None else {"rope_theta": float(raw.rope_theta)}
    for section, values in (("rope_parameters", raw.rope_parameters), ("rope_scaling", raw.rope_scaling)):
        theta = _plain_rope(values or {}, f"{where}: {section}")
        if theta is not None:
            thetas[f"{section}.rope_theta"] = theta
    if not thetas:
        raise CheckpointError(
            "rope_theta is missing", where=where, expected="rope_theta at the top level or in rope_parameters"
        )
    if len(set(thetas.values())) > 1:
        raise CheckpointError("rope_theta is given twice with different values", where=where, got=thetas)
    for flag, neutral in ((raw.partial_rotary_factor, 1.0), (raw.rope_is_neox_style, True)):
        if flag is not None and flag != neutral:
            raise CheckpointError(
                "Only rotate-half over the whole head dimension is implemented", where=where, got=flag
            )
    return next(iter(thetas.values()))


def _plain_rope(values: dict[str, Any], where: str) -> float | None:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind is not None and kind != "default":
        raise CheckpointError(
            f"Rope scaling {ascii(kind)[:60]} is not implemented",
            where=where,
            got=ascii(values)[:200],
            expected="default",
        )
    for key, value in values.items():
        neutral = (
            key in ("rope_type", "type", "rope_theta")
            or value is None
            or (key in ("factor", "partial_rotary_factor") and value == 1)
        )
        if not neutral:
            raise CheckpointError(
                f"Rope parameter {ascii(key)[:60]} is not implemented", where=where, got=ascii(value)[:100]
            )
    theta = values.get("rope_theta")
    if theta is None:
        return None
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < 1e18:
        raise CheckpointError("Bad rope_theta", where=where, got=ascii(theta)[:60], expected="a positive number")
    return float(theta)
