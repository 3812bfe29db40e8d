"""Names and shapes of every tensor a drafter must have, and how stored names map to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.checkpoint.safetensors_store import TensorInfo
from dspine_export.errors import CheckpointError

CODES = "transfer_codes"
READY = "transfer_ready"
# The target's matrices, which some exporters copy in; ours come from the target itself.
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")
WEIGHT_DTYPES = ("BF16", "F16", "F32", "F64")
_PREFIXES = ("model.", "draft_model.")


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight by canonical name; the transfer codes are separate because they may be absent."""
    d, heads, kv, dim, ffn = (
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
    )
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, config.num_taps * d),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (d,),
            f"{prefix}post_attention_layernorm.weight": (d,),
            f"{prefix}self_attn.q_proj.weight": (heads * dim, d),
            f"{prefix}self_attn.k_proj.weight": (kv * dim, d),
            f"{prefix}self_attn.v_proj.weight": (kv * dim, d),
            f"{prefix}self_attn.o_proj.weight": (d, heads * dim),
            f"{prefix}self_attn.q_norm.weight": (dim,),
            f"{prefix}self_attn.k_norm.weight": (dim,),
            f"{prefix}mlp.gate_proj.weight": (ffn, d),
            f"{prefix}mlp.up_proj.weight": (ffn, d),
            f"{prefix}mlp.down_proj.weight": (d, ffn),
        }
    return shapes | _injection_shapes(config)


def _injection_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    if config.transfer is None:
        return {}
    d, r, m = config.hidden_size, config.transfer.rank, config.transfer.message_size
    shapes: dict[str, tuple[int, ...]] = {
        "injection.message.weight": (m, r),
        "injection.receiver_gate.weight": (m, r),
        "injection.predecessor_gate.weight": (m, r),
        "injection.bias": (m,),
    }
    for layer in range(config.num_layers):
        shapes[f"injection.readouts.{layer}.weight"] = (r, d)
        shapes[f"injection.writes.{layer}.weight"] = (d, m)
    return shapes


def canonical_names(stored: Iterable[str]) -> dict[str, str]:
    """Stored name -> canonical name: one prefix shared by everything (but an lm_head) is removed."""
    names = list(stored)
    for prefix in _PREFIXES:
        rest = [name for name in names if name != "lm_head.weight"]
        if rest and all(name.startswith(prefix) for name in rest):
            return {name: name.removeprefix(prefix) for name in names}
    return {name: name for name in names}


def check_tensors(config: DrafterConfig, infos: Mapping[str, TensorInfo], where: object) -> None:
    """Compare canonical `infos` with what `config` demands: nothing missing, nothing unexplained, shapes and dtypes right."""
    expected = expected_shapes(config)
    optional = {CODES, READY} if config.is_dspine else set()
    missing = [name for name in expected if name not in infos]
    extra = [name for name in infos if name not in expected and name not in optional]
    if missing or extra:
        raise CheckpointError(
            "Missing tensors" if missing else "Unexpected tensors",
            where=where,
            got=f"unexpected: {_listed(extra)}" if extra else f"{len(infos)} tensors, all known",
            expected=f"also {_listed(missing)}" if missing else "only tensors the configuration accounts for",
            fix="config.json and the weights belong to different models, or the checkpoint has parts this exporter does not implement",
        )
    if config.transfer is not None and CODES in infos:
        expected[CODES] = (config.vocab_size, config.transfer.rank)
    for name, shape in expected.items():
        info = infos[name]
        if info.shape != shape:
            raise CheckpointError(
                f"Tensor {name} has the wrong shape", where=info.path, got=list(info.shape), expected=list(shape)
            )
        if info.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"Tensor {name} has an unsupported dtype",
                where=info.path,
                got=info.dtype,
                expected=" or ".join(WEIGHT_DTYPES),
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(ascii(name)[1:-1][:120] for name in sorted(names)[:6])
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")
