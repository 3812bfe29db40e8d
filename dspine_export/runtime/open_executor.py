"""Opening a drafter, from a checkpoint or a bundle, with the executor of the caller's choice."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from dspine_export.bundle import is_bundle, open_bundle
from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.errors import DspineWarning, UsageError
from dspine_export.model.loading import load_checkpoint, warn_of_foreign_codes
from dspine_export.runtime.executor import DrafterExecutor

ExecutorName = Literal["torch", "eager", "onnxruntime", "tensorrt"]
EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
DRAFTER_FOLDER, PORTABLE_FOLDER = "drafter", "portable"  # of a bundle
FLOAT8_CAPABILITY = (8, 9)
MAX_CANDIDATES = 64  # `dspine_kernels.topk.MAX_CANDIDATES`, known without loading Triton


def drafter_folder(source: Path) -> Path:
    """The checkpoint inside a bundle, or `source` itself when it is a checkpoint."""
    return source / DRAFTER_FOLDER if is_bundle(source) else source


def check_executor(name: str, weights: str, device: str) -> None:
    """What `open_executor` refuses whatever the drafter, known before anything is loaded. device: ``cpu`` or ``cuda``.

    Raises:
        UsageError
    """
    if name not in EXECUTORS:
        raise UsageError("Unknown drafter executor", got=name, expected=", ".join(EXECUTORS))
    if weights not in ("full", "fp8"):
        raise UsageError("Unknown weight format", where="weights", got=weights, expected="full or fp8")
    if weights == "fp8" and (name != "torch" or device != "cuda"):
        raise UsageError(
            "Only the torch executor on a GPU drafts with float8 weights",
            where="weights fp8",
            got=f"executor {name} on {device}",
            expected="executor torch on cuda",
            fix="choose those (--executor torch --device cuda), or full weights",
        )


def open_executor(
    name: str, source: Path, embed_tokens: Tensor, lm_head: Tensor, *, weights: str = "full"
) -> DrafterExecutor:
    """A drafter bound to its target's two matrices.

    Args:
        name: ``torch`` (checkpoint or bundle; our kernels in CUDA graphs where the tables lie on a GPU, else the eager model),
            ``eager`` (the eager model anywhere), ``onnxruntime`` or ``tensorrt`` (bundle only).
        source: a drafter checkpoint, or a bundle made of one.
        embed_tokens, lm_head: the target's [V', d]; rows beyond the drafter's vocabulary (padding) are left out.
        weights: ``full``, or ``fp8`` to draft with rounded matrices (executor torch on a GPU, bfloat16).

    Raises:
        UsageError: unknown name, weights that it cannot read, or a checkpoint where a bundle is needed.
        CheckpointError, DependencyError, VerificationError: the drafter, or what must run it, is unfit.
    """
    check_executor(name, weights, embed_tokens.device.type)
    if name in ("torch", "eager"):
        return _open_torch(drafter_folder(source), embed_tokens, lm_head, weights, kernels=name == "torch")
    if not is_bundle(source):
        fix = "compile it first (dspine-export build), or use the torch executor"
        raise UsageError(f"Executor {name} runs compiled bundles", got=source, expected="a bundle", fix=fix)
    bundle = open_bundle(source)
    if not (bundle.path / PORTABLE_FOLDER).is_dir():
        raise UsageError(
            f"This bundle has no graphs for executor {name}: it was built for vLLM",
            got=bundle.path,
            fix="draft with the torch model (--executor torch), or build a bundle with graphs (--target trtllm or onnx)",
        )
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


def _open_torch(folder: Path, embed_tokens: Tensor, lm_head: Tensor, weights: str, *, kernels: bool) -> DrafterExecutor:
    from dspine_export.runtime.torch_executor import TorchExecutor

    loaded = load_checkpoint(folder)
    rows = loaded.config.vocab_size
    drafter = loaded.bind(embed_tokens=embed_tokens[:rows], lm_head=lm_head[:rows])
    if kernels and embed_tokens.device.type == "cuda":
        obstacle = kernel_obstacle(loaded.config, embed_tokens.dtype)
        if weights == "fp8":
            _check_fp8(obstacle, embed_tokens)
        if obstacle is None:
            from dspine_export.runtime.cuda_executor import CudaExecutor

            return CudaExecutor(drafter, "fp8" if weights == "fp8" else "full")
        warnings.warn(
            f"The eager model drafts, which is slower than the kernels: {obstacle}", DspineWarning, stacklevel=3
        )
    executor = TorchExecutor(drafter)
    executor.name = "torch" if kernels else "eager"
    return executor


def _check_fp8(obstacle: str | None, like: Tensor) -> None:
    capability = torch.cuda.get_device_capability(like.device)
    if capability < FLOAT8_CAPABILITY:
        obstacle = "a GPU of compute capability {}.{}".format(*capability)
    if obstacle is None and like.dtype != torch.bfloat16:
        obstacle = f"a target in {like.dtype}"
    if obstacle is not None:
        expected = "our kernels in bfloat16, compute capability 8.9 and later"
        raise UsageError("Float8 weights cannot be used", where="weights", got=obstacle, expected=expected)


def kernel_obstacle(config: DrafterConfig, dtype: torch.dtype) -> str | None:
    """Why our kernels cannot run this drafter here; None where they can."""
    candidates = config.transfer.top_k if config.transfer is not None else 1
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they compute in float32 or bfloat16, not in {dtype}"
    if candidates > MAX_CANDIDATES:
        return f"they take at most {MAX_CANDIDATES} candidates a slot, the drafter has {candidates}"
    return None
