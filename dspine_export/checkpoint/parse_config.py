"""From a parsed `config.json` to a `DrafterConfig`: one set of names for every layout, and every contradiction refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspine_export.checkpoint.architectures import DSPINE, check_architecture, detect_layout, flatten
from dspine_export.checkpoint.attention_rules import resolve_causality, resolve_rope_theta, resolve_windows
from dspine_export.checkpoint.config import DrafterConfig, Layout
from dspine_export.checkpoint.raw_config import RawConfig, parse_raw_config
from dspine_export.checkpoint.transfer_config import check_transfer_sizes, parse_transfer
from dspine_export.errors import CheckpointError

REFERENCE_BLOCK_SIZE = 16
_MAX_BLOCK_SIZE = 1024
_MODEL_TYPES = (None, "qwen3", "dspine", "dflash", "speculator_model")


def parse_config(
    raw_json: Mapping[str, Any],
    where: str,
    shapes: Mapping[str, tuple[int, ...]],
    has_codes_file: bool,
    warnings: list[str],
) -> DrafterConfig:
    """Validate `raw_json` and resolve its layout.

    Args:
        raw_json: the parsed `config.json`; `where` is its path, for messages.
        shapes: shape of every stored tensor, by canonical name; the reference layout takes r and m from them.
        has_codes_file: whether the reference layout's separate codes file is present.
        warnings: receives notes about tolerated oddities.
    """
    flat = flatten(raw_json, where)
    layout = detect_layout(flat, list(shapes), has_codes_file)
    architecture = check_architecture(_declared(flat, where), layout, where)
    raw = parse_raw_config(flat, where)
    _check_family(raw, architecture, where)
    config = _resolve(raw, flat, layout, architecture, shapes, where, warnings)
    _check_consistency(config, where)
    return config


def _resolve(
    raw: RawConfig,
    flat: Mapping[str, Any],
    layout: Layout,
    architecture: str,
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    warnings: list[str],
) -> DrafterConfig:
    layer_types, window = resolve_windows(raw, layout, where, warnings)
    return DrafterConfig(
        layout=layout,
        architecture=architecture,
        hidden_size=raw.hidden_size,
        num_layers=raw.num_hidden_layers,
        num_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=raw.head_dim,
        intermediate_size=raw.intermediate_size,
        vocab_size=raw.vocab_size,
        rms_norm_eps=float(raw.rms_norm_eps),
        rope_theta=resolve_rope_theta(raw, where),
        max_position_embeddings=raw.max_position_embeddings,
        block_size=_block_size(raw, layout, where, warnings),
        mask_token_id=_mask_token_id(raw, where),
        target_layer_ids=_taps(raw, where),
        num_target_layers=raw.num_target_layers,
        is_causal=resolve_causality(raw, architecture, layout, where, warnings),
        layer_types=layer_types,
        sliding_window=window,
        dtype=None if raw.dtype is None else raw.dtype.removeprefix("torch."),
        transfer=parse_transfer(flat, layout, shapes, where),
    )


def _declared(flat: Mapping[str, Any], where: str) -> list[str] | None:
    names = flat.get("architectures")
    if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return names
    raise CheckpointError(
        "Bad value of configuration key 'architectures'",
        where=where,
        got=ascii(names)[:100],
        expected="a list of names",
    )


def _check_family(raw: RawConfig, architecture: str, where: str) -> None:
    """Refuse what shares the names of a Qwen3 backbone but not its maths."""
    nested = raw.dflash_config
    if raw.model_type not in _MODEL_TYPES:
        raise CheckpointError(
            "Unsupported drafter model_type", where=where, got=ascii(raw.model_type)[:60], expected="qwen3"
        )
    if raw.attention_bias or raw.mlp_bias:
        name = "attention_bias" if raw.attention_bias else "mlp_bias"
        raise CheckpointError(f"{name}: true is not supported", where=where, expected="projections without bias")
    if raw.hidden_act not in ("silu", "swish"):
        raise CheckpointError("Unsupported hidden_act", where=where, got=ascii(raw.hidden_act)[:60], expected="silu")
    plain = (None, "", "dflash", "dspine" if architecture == DSPINE else "dflash")
    if nested.projector_type not in plain:
        raise CheckpointError(
            f"Unknown projector type {ascii(nested.projector_type)[:60]}",
            where=f"{where}: dflash_config.projector_type",
            expected="none, or 'dflash'",
            fix="this checkpoint has a head this exporter does not implement; running it without that head would be silently wrong",
        )
    if nested.attention_mode not in (None, "gqa", "mha"):
        raise CheckpointError(
            "Unsupported attention_mode", where=where, got=ascii(nested.attention_mode)[:60], expected="gqa or mha"
        )
    _check_other_conventions(raw, where)


def _check_other_conventions(raw: RawConfig, where: str) -> None:
    if raw.sample_from_anchor:
        raise CheckpointError(
            "sample_from_anchor: true means shifted slots (DSpark)",
            where=where,
            expected="false: slot i predicts position i",
        )
    if raw.draft_vocab_size not in (None, raw.vocab_size):
        raise CheckpointError(
            "Reduced draft vocabularies are not supported",
            where=where,
            got=raw.draft_vocab_size,
            expected=raw.vocab_size,
        )
    if raw.target_hidden_size not in (None, raw.hidden_size):
        raise CheckpointError(
            "target_hidden_size differs from hidden_size",
            where=where,
            got=raw.target_hidden_size,
            expected=raw.hidden_size,
        )


def _block_size(raw: RawConfig, layout: Layout, where: str, warnings: list[str]) -> int:
    outer, nested = raw.block_size, raw.dflash_config.block_size
    if layout == "reference":
        if {outer, nested} - {None, REFERENCE_BLOCK_SIZE}:
            warnings.append(
                f"block_size {outer or nested} ignored: the reference implementation trains blocks of {REFERENCE_BLOCK_SIZE}"
            )
        return REFERENCE_BLOCK_SIZE
    if outer is not None and nested is not None and outer != nested:
        raise CheckpointError(
            "block_size and dflash_config.block_size disagree", where=where, got=f"{outer} and {nested}"
        )
    size = outer if outer is not None else nested
    if size is None or not 2 <= size <= _MAX_BLOCK_SIZE:
        raise CheckpointError(
            "Bad block_size",
            where=where,
            got=size,
            expected=f"2 to {_MAX_BLOCK_SIZE}: the anchor and at least one proposed token",
        )
    return size


def _mask_token_id(raw: RawConfig, where: str) -> int:
    outer, nested = raw.mask_token_id, raw.dflash_config.mask_token_id
    if outer is not None and nested is not None and outer != nested:
        raise CheckpointError(
            "mask_token_id and dflash_config.mask_token_id disagree", where=where, got=f"{outer} and {nested}"
        )
    value = nested if nested is not None else outer
    if value is None:
        raise CheckpointError(
            "mask_token_id is missing",
            where=f"{where}: dflash_config",
            expected="the id the drafter was trained to fill in",
        )
    if value >= raw.vocab_size:
        raise CheckpointError(
            "mask_token_id is outside the vocabulary", where=where, got=value, expected=f"0 to {raw.vocab_size - 1}"
        )
    return value


def _taps(raw: RawConfig, where: str) -> tuple[int, ...]:
    """Tapped target layers; formats that count from the embedding (speculators) are shifted, and must agree where both are given."""
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in (
        ("dflash_config.target_layer_ids", raw.dflash_config.target_layer_ids),
        ("target_layer_ids", raw.target_layer_ids),
    ):
        if ids is not None:
            found[name] = ids
    for name in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        ids = getattr(raw, name)
        if ids is not None:
            found[f"{name} - 1"] = tuple(value - 1 for value in ids)
    if len(set(found.values())) > 1:
        raise CheckpointError(
            "Fields that name the tapped target layers disagree",
            where=where,
            got="; ".join(f"{name} = {list(ids)}" for name, ids in found.items()),
            expected="aux_hidden_state_layer_ids = target_layer_ids + 1 (it counts from the embedding)",
            fix="keep only the field you trust; an off-by-one here runs, and is silently wrong",
        )
    taps = next(iter(found.values()), ())
    depth = raw.num_target_layers
    if (
        not taps
        or min(taps) < 0
        or len(set(taps)) != len(taps)
        or len(taps) > 1024
        or (depth is not None and max(taps) >= depth)
    ):
        raise CheckpointError(
            "Bad target_layer_ids",
            where=f"{where}: dflash_config.target_layer_ids",
            got=list(taps)[:64],
            expected=f"distinct layer indices, 0 to {depth - 1 if depth else 'the last target layer'}",
        )
    return taps


def _check_consistency(config: DrafterConfig, where: str) -> None:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            "Key/value heads do not divide the query heads",
            where=where,
            got=f"{config.num_heads} and {config.num_kv_heads}",
        )
    if config.head_dim % 2:
        raise CheckpointError(
            "head_dim is odd", where=where, got=config.head_dim, expected="an even number (rotate-half rope)"
        )
    if config.transfer is not None:
        check_transfer_sizes(config.transfer, config.hidden_size, config.vocab_size, where)
