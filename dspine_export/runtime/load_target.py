"""Loading the embedded target: local files, safetensors only, no code from the model directory; unsupported models refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from dspine_export.checkpoint.target import read_target
from dspine_export.errors import CheckpointError, DependencyError, UsageError
from dspine_export.runtime.ragged_cache import ATTENTION, register_attention
from dspine_export.runtime.target import TargetExecutor

MODEL_TYPES = ("llama", "qwen3")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Their frequencies depend on the length reached so far: a cached key would have to change when a block is rolled back.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def open_target(
    path: Path,
    taps: Iterable[int],
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    capture: bool | None = None,
) -> TargetExecutor:
    """Loads the causal language model in the Hugging Face directory `path`.

    Args:
        taps: target layers whose outputs the drafter reads.
        dtype: ``float32`` or ``bfloat16``.
        capture: see `TargetExecutor`.

    Raises:
        UsageError: dtype or device. CheckpointError: damaged, incomplete or unsupported model. DependencyError: no transformers, no GPU.
    """
    where = check_device(device)
    if dtype not in DTYPES:
        raise UsageError("Unsupported target dtype", got=dtype, expected=" or ".join(DTYPES))
    info = read_target(path)
    taps = tuple(taps)
    if any(not 0 <= layer < info.num_layers for layer in taps):
        raise CheckpointError(
            "Tapped layer beyond the target's depth", where=path, got=list(taps), expected=f"0 .. {info.num_layers - 1}"
        )
    try:
        import transformers
    except ImportError as error:
        fix = "pip install 'transformers>=5.0'"
        raise DependencyError("The embedded target needs transformers", got=str(error), fix=fix) from error
    register_attention()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # what a load report says, `_check_complete` raises
    _check_config(_read(transformers.AutoConfig, path), path)
    model, loading = _read(
        transformers.AutoModelForCausalLM,
        path,
        dtype=DTYPES[dtype],
        use_safetensors=True,
        attn_implementation=ATTENTION,
        output_loading_info=True,
    )
    _check_complete(loading, path)
    model = model.to(where).eval().requires_grad_(False)
    return TargetExecutor(model, taps, _eos_ids(model), capture=capture)


def _read(factory: Any, path: Path, **options: Any) -> Any:
    try:
        return factory.from_pretrained(str(path), local_files_only=True, trust_remote_code=False, **options)
    except torch.OutOfMemoryError as error:
        raise DependencyError(
            "The target does not fit the device's memory", where=path, got=str(error)[:200]
        ) from error
    except Exception as error:  # transformers has no error type of its own
        got = f"{type(error).__name__}: {error}"[:600]
        raise CheckpointError("transformers cannot load the target", where=path, got=got) from error


def _check_config(config: Any, path: Path) -> None:
    where = path / "config.json"
    if config.model_type not in MODEL_TYPES:
        raise CheckpointError(
            "The embedded target runs Llama and Qwen3 models",
            where=where,
            got=config.model_type,
            expected=" or ".join(MODEL_TYPES),
            fix="serve this target with vLLM",
        )
    if getattr(config, "quantization_config", None):
        raise CheckpointError("The embedded target does not run quantised models", where=where, fix="use plain weights")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise CheckpointError("The embedded target has full attention only", where=where, got=", ".join(sorted(kinds)))
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        got, expected = rope["rope_type"], "frequencies that do not depend on the length reached"
        raise CheckpointError(
            "The target's rotary embedding cannot be rolled back", where=where, got=got, expected=expected
        )


def _check_complete(loading: Any, path: Path) -> None:
    """transformers initialises missing weights at random and only logs it."""
    for kind in ("missing_keys", "mismatched_keys"):
        names = sorted(map(str, loading.get(kind) or ()))
        if names:
            problem = "misses tensors" if kind == "missing_keys" else "has tensors of the wrong shape"
            raise CheckpointError(f"The target {problem}", where=path, got=f"{len(names)}: {', '.join(names[:4])}")


def _eos_ids(model: Any) -> tuple[int, ...]:
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


def check_device(device: str | torch.device) -> torch.device:
    """The device by its name. Raises UsageError: not one of ours. DependencyError: no usable GPU."""
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UsageError("Unknown device", got=device, expected="cpu or cuda") from error
    if where.type not in ("cpu", "cuda"):
        raise UsageError("Unsupported device", got=device, expected="cpu or cuda")
    if where.type == "cuda" and not torch.cuda.is_available():
        fix = "use --device cpu, or install a CUDA build of torch on a machine with a GPU"
        raise DependencyError("No usable CUDA device", got=device, fix=fix)
    return where
