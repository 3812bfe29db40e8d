"""Opening a drafter, from a checkpoint or a bundle, with the executor of the caller's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from dspine_export.bundle import is_bundle, open_bundle
from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.errors import UsageError
from dspine_export.model.loading import load_checkpoint, warn_of_foreign_codes
from dspine_export.runtime.executor import DrafterExecutor

ExecutorName = Literal["torch", "onnxruntime", "tensorrt"]
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
DRAFTER_FOLDER, PORTABLE_FOLDER = "drafter", "portable"  # of a bundle


def drafter_folder(source: Path) -> Path:
    """The checkpoint inside a bundle, or `source` itself when it is a checkpoint."""
    return source / DRAFTER_FOLDER if is_bundle(source) else source


def open_executor(name: str, source: Path, embed_tokens: Tensor, lm_head: Tensor) -> DrafterExecutor:
    """A drafter bound to its target's two matrices.

    Args:
        name: ``torch`` (checkpoint or bundle), ``onnxruntime`` or ``tensorrt`` (bundle only).
        source: a drafter checkpoint, or a bundle made of one.
        embed_tokens, lm_head: the target's [V', d]; rows beyond the drafter's vocabulary (padding) are left out.

    Raises:
        UsageError: unknown name, or a checkpoint where a bundle is needed.
        CheckpointError, DependencyError, VerificationError: the drafter, or what must run it, is unfit.
    """
    if name not in EXECUTORS:
        raise UsageError("Unknown drafter executor", got=name, expected=", ".join(EXECUTORS))
    if name == "torch":
        return _open_torch(drafter_folder(source), embed_tokens, lm_head)
    if not is_bundle(source):
        fix = "compile it first (dspine-export build), or use the torch executor"
        raise UsageError(f"Executor {name} runs compiled bundles", got=source, expected="a bundle", fix=fix)
    bundle = open_bundle(source)
    checkpoint = open_checkpoint(bundle.path / DRAFTER_FOLDER)
    config = checkpoint.config
    embed_tokens, lm_head = embed_tokens[: config.vocab_size], lm_head[: config.vocab_size]
    if checkpoint.codes is not None:
        warn_of_foreign_codes(checkpoint.tensors.read(checkpoint.codes.name), lm_head)
    if name == "onnxruntime":
        from dspine_export.runtime.onnx_executor import OnnxExecutor

        return OnnxExecutor(config, bundle.path / PORTABLE_FOLDER, embed_tokens, lm_head)
    from dspine_export.runtime.tensorrt_executor import open_tensorrt

    return open_tensorrt(bundle, config, embed_tokens, lm_head)


def _open_torch(folder: Path, embed_tokens: Tensor, lm_head: Tensor) -> DrafterExecutor:
    from dspine_export.runtime.torch_executor import TorchExecutor

    loaded = load_checkpoint(folder)
    rows = loaded.config.vocab_size
    return TorchExecutor(loaded.bind(embed_tokens=embed_tokens[:rows], lm_head=lm_head[:rows]))
