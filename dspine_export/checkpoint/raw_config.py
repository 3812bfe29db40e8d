"""Pydantic models of `config.json` as it is written: the boundary where types, ranges and spellings are checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from dspine_export.checkpoint.config_keys import keep_known
from dspine_export.errors import CheckpointError

Size = Annotated[int, Field(strict=True, ge=1, le=2**24)]
Index = Annotated[int, Field(strict=True, ge=0, le=2**24)]
Flag = Annotated[bool, Field(strict=True)]
# A JSON integer is a fine float; a string or a boolean is not.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
MAX_LAYERS = 1024
Model = TypeVar("Model", bound=BaseModel)


class _Raw(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class RawProbe(_Raw):
    """`dspine_config.transfer_probe`: the rows of the transfer codes that a recomputation must reproduce."""

    token_ids: tuple[Index, ...] = Field(validation_alias=AliasChoices("token_ids", "ids"))
    components: tuple[tuple[Number, ...], ...] = Field(validation_alias=AliasChoices("components", "codes"))


class RawTransfer(_Raw):
    """`dspine_config`, without its training keys."""

    transfer_rank: Size
    message_size: Size
    top_k: Size = 16
    transfer_basis: str | None = None
    transfer_probe: RawProbe | None = None


class RawDFlash(_Raw):
    """`dflash_config`: masks, taps and the extensions that other DFlash relatives put there."""

    mask_token_id: Index | None = None
    target_layer_ids: tuple[Annotated[int, Field(strict=True)], ...] | None = None
    block_size: Annotated[int, Field(strict=True)] | None = None
    causal: Flag | None = None
    projector_type: str | None = None
    attention_mode: str | None = None
    use_swa: Flag | None = None
    swa_window_size: Size | None = None


class RawConfig(_Raw):
    """Top level of `config.json` (after unwrapping `config` or `transformer_layer_config`)."""

    architectures: tuple[str, ...] | None = None
    model_type: str | None = None
    hidden_size: Size
    num_hidden_layers: Annotated[int, Field(strict=True, ge=1, le=MAX_LAYERS)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size
    intermediate_size: Size
    vocab_size: Size
    draft_vocab_size: Size | None = None
    target_hidden_size: Size | None = None
    max_position_embeddings: Size = 32768
    rms_norm_eps: Annotated[Number, Field(gt=0, lt=1)]
    hidden_act: str = "silu"
    attention_bias: Flag | None = None
    mlp_bias: Flag | None = None
    rope_theta: Annotated[Number, Field(gt=0)] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: Number | None = None
    rope_is_neox_style: Flag | None = None
    is_causal: Flag | None = None
    block_size: Annotated[int, Field(strict=True)] | None = None
    num_target_layers: Size | None = None
    layer_types: tuple[str, ...] | None = None
    sliding_window: Size | None = None
    use_sliding_window: Flag | None = None
    tie_word_embeddings: Flag | None = None
    dtype: str | None = Field(default=None, validation_alias=AliasChoices("dtype", "torch_dtype"))
    mask_token_id: Index | None = None
    target_layer_ids: tuple[Annotated[int, Field(strict=True)], ...] | None = None
    aux_hidden_state_layer_ids: tuple[Annotated[int, Field(strict=True)], ...] | None = None
    eagle_aux_hidden_state_layer_ids: tuple[Annotated[int, Field(strict=True)], ...] | None = None
    sample_from_anchor: Flag | None = None
    auto_map: dict[str, Any] | None = None
    dflash_config: RawDFlash = RawDFlash()


# Same quantity, two spellings: (canonical, alias).
_TRANSFER_ALIASES = (("transfer_rank", "transfer_dim"), ("message_size", "message_dim"))


def parse_raw_config(raw: Mapping[str, Any], where: str) -> RawConfig:
    """Check `raw` (the flat top level) and its `dflash_config`; `dspine_config` is parsed by `parse_raw_transfer`."""
    known = {*RawConfig.model_fields, "torch_dtype", "dspine_config"}
    kept = keep_known(raw, known, where)
    kept.pop("dspine_config", None)
    if "dtype" in kept and "torch_dtype" in kept:
        del kept["torch_dtype"]
    section = kept.pop("dflash_config", None) or {}
    if not isinstance(section, dict):
        raise CheckpointError("dflash_config is not an object", where=where, got=ascii(section)[:100])
    kept["dflash_config"] = keep_known(section, RawDFlash.model_fields, f"{where}: dflash_config")
    return _validated(RawConfig, kept, where)


def parse_raw_transfer(section: object, where: str) -> tuple[RawTransfer, dict[str, Any]]:
    """Check `dspine_config`; returns the parsed sizes and the ignored training keys."""
    where = f"{where}: dspine_config"
    if not isinstance(section, dict):
        raise CheckpointError("dspine_config is not an object", where=where, got=ascii(section)[:100])
    section = dict(section)
    for name, alias in _TRANSFER_ALIASES:
        value = section.pop(alias, None)
        if value is not None and section.setdefault(name, value) != value:
            raise CheckpointError(
                f"{name} and {alias} disagree",
                where=where,
                got=f"{section[name]!r} and {value!r}",
                expected="one value",
            )
    kept = keep_known(section, RawTransfer.model_fields, where)
    extra = {key: value for key, value in section.items() if key not in kept}
    return _validated(RawTransfer, kept, where), extra


def _validated(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first, *rest = error.errors(include_url=False)
        key = ".".join(map(str, first["loc"]))
        missing = first["type"] == "missing"
        raise CheckpointError(
            f"Configuration key {key!r} is missing" if missing else f"Bad value of configuration key {key!r}",
            where=where,
            got=None if missing else ascii(first["input"])[:200],
            expected=first["msg"],
            fix=f"{len(rest)} more problem(s) in this file" if rest else None,
        ) from None
