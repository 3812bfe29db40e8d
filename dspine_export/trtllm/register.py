"""Registration: version gate, signature comparison, and the builder that TensorRT-LLM calls for ``decoding_type: DSpark``."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspine_export.bundle import Bundle, open_bundle
from dspine_export.bundle.manifest import MANIFEST_NAME
from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.checkpoint.load import Checkpoint, open_checkpoint
from dspine_export.errors import DependencyError, UsageError
from dspine_export.model.drafter_model import DrafterModel
from dspine_export.model.loading import LoadedCheckpoint
from dspine_export.runtime.open_executor import kernel_obstacle
from dspine_export.trtllm.block_executors import BlockExecutor, TorchBlock
from dspine_export.trtllm.context_part import context_only
from dspine_export.trtllm.draft_model import DSpineForCausalLM, Loader
from dspine_export.trtllm.files import CONFIG_NAME, FOLDER, misplaced_drafter
from dspine_export.trtllm.plan_block import PlanBlock, PlanSession
from dspine_export.trtllm.settings import AGAIN, ALLOW_VARIABLE, PACKAGE_NAME, ModuleSettings
from dspine_export.trtllm.signatures import PACKAGE, compare
from dspine_export.trtllm.versions import recorded_versions, require_checked, unchecked_allowed

DRAFTER_FOLDER = "drafter"  # of a bundle


def register_bundle(settings: dict[str, Any] | ModuleSettings, module_file: Path) -> None:
    """See `dspine_export.trtllm.register`."""
    if isinstance(settings, dict):
        settings = ModuleSettings.parse(settings, module_file)
    check_package(allow_unchecked=unchecked_allowed(settings.allow_unchecked))
    bundle = _open_bundle_of(module_file, settings)
    if (stale := misplaced_drafter(bundle.path)) is not None:
        warnings.warn(
            f"{bundle.path / FOLDER / CONFIG_NAME} names another drafter than this bundle's ({stale}): set speculative_model to "
            f"{bundle.path / DRAFTER_FOLDER} in it",
            stacklevel=2,
        )
    register_builder(bundle, settings, module_file)


def _open_bundle_of(module_file: Path, settings: ModuleSettings) -> Bundle:
    path = (module_file.resolve().parent / settings.bundle).resolve()
    if not (path / MANIFEST_NAME).is_file():
        raise UsageError(
            "the generated package is not inside its bundle",
            where=module_file,
            got=f"no {MANIFEST_NAME} in {path}",
            expected=f"this package as {FOLDER}/{PACKAGE_NAME} of the directory that dspine-export build wrote",
            fix=f"move or copy the whole bundle, not its {FOLDER} folder alone; a link to that folder will do",
        )
    return open_bundle(path)


def check_package(*, allow_unchecked: bool) -> str:
    """The installed TensorRT-LLM's version, once it passed the gate and its hooks were compared.

    Raises:
        DependencyError: not installed, unchecked version, or hooks that moved; with ``allow_unchecked`` the last two only warn.
    """
    try:
        version = str(importlib.import_module(PACKAGE).__version__)
    except Exception as error:
        raise DependencyError("TensorRT-LLM cannot be imported", got=f"{type(error).__name__}: {error}") from error
    snapshot = require_checked(version, allow_unchecked=allow_unchecked)
    moved = compare(snapshot)
    if moved and not allow_unchecked:
        raise DependencyError(
            f"TensorRT-LLM {version} differs from the sources this adapter was written for",
            where=moved[0].hook.name,
            got="; ".join(map(str, moved)),
            expected=f"the signatures of {snapshot.release}",
            fix=f"install {recorded_versions()}; or build with --allow-unchecked, or set {ALLOW_VARIABLE}=1 (doctor lists every hook)",
        )
    for entry in moved:
        warnings.warn(f"TensorRT-LLM {version}: {entry}", stacklevel=2)
    return version


def register_builder(bundle: Bundle, settings: ModuleSettings, module_file: Path) -> None:
    """Register the bundle's drafter for the DSpark mode; TensorRT-LLM lets external registrations win over its own.

    Raises:
        UsageError: the package in ``module_file`` was generated for another drafter.
    """
    interface = importlib.import_module(f"{PACKAGE}._torch.speculative.interface")
    utilities = importlib.import_module(f"{PACKAGE}._torch.models.modeling_utils")
    checkpoint = open_checkpoint(bundle.path / DRAFTER_FOLDER)
    if settings.max_draft_len != checkpoint.config.block_size - 1:
        raise UsageError(
            "The generated package does not belong to the bundle's drafter",
            where=f"{module_file}: max_draft_len",
            got=settings.max_draft_len,
            expected=f"{checkpoint.config.block_size - 1} (block size - 1)",
            fix=AGAIN,
        )

    def build_dspine_draft(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> nn.Module:
        spec_config = model_config.spec_config
        _check_options(spec_config, checkpoint)
        loader = make_loader(bundle, checkpoint, settings)
        return DSpineForCausalLM(checkpoint.config, draft_config, spec_config.attention_backend, loader)

    utilities.register_draft_model(interface.SpeculativeDecodingMode.DSPARK)(build_dspine_draft)


def make_loader(bundle: Bundle, checkpoint: Checkpoint, settings: ModuleSettings) -> Loader:
    """What loads the drafter once the target's matrices are known."""

    def load_torch(embed_tokens: Tensor, lm_head: Tensor) -> tuple[DrafterModel, BlockExecutor]:
        drafter = LoadedCheckpoint(checkpoint).bind(embed_tokens=embed_tokens, lm_head=lm_head, check_codes=False)
        if not _runs_kernels(drafter.config, embed_tokens):
            return drafter.model, TorchBlock(drafter)
        from dspine_export.trtllm.kernel_block import open_kernels

        return open_kernels(drafter)

    def load_plan(embed_tokens: Tensor, lm_head: Tensor) -> tuple[DrafterModel, BlockExecutor]:
        network, (session, columns) = context_only(checkpoint, embed_tokens), _open_draft(bundle, embed_tokens)
        copies = _runs_kernels(checkpoint.config, embed_tokens)
        return network, PlanBlock(checkpoint.config, session, embed_tokens, lm_head, columns, copies=copies)

    return load_torch if settings.executor == "torch" else load_plan


def _runs_kernels(config: DrafterConfig, like: Tensor) -> bool:
    """On a GPU, unless something stands in the way, which is said."""
    if not like.is_cuda:
        return False
    obstacle = kernel_obstacle(config, like.dtype)
    if obstacle is not None:
        warnings.warn(f"the torch model drafts, which is slower than the kernels: {obstacle}", stacklevel=3)
    return obstacle is None


def _open_draft(bundle: Bundle, embed_tokens: Tensor) -> tuple[PlanSession, int]:
    """The draft plan that fits this process, checked before it is read, and the most cache columns its profile takes."""
    from dspine_export.lowering.engine.backend import open_backend
    from dspine_export.runtime.plan_check import choose_engine
    from dspine_export.runtime.plan_runner import load_plan
    from dspine_export.runtime.tensorrt_executor import load_plugins

    device = embed_tokens.device
    checked = choose_engine(bundle, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)
    backend = open_backend(checked.entry.builder)
    load_plugins(bundle, checked, backend)
    plan = load_plan(backend, checked.plans["draft"], device, host_code=checked.entry.carries_plugins)
    return plan, checked.entry.profile.context.max


def _check_options(spec_config: Any, checkpoint: Checkpoint) -> None:
    drafted = checkpoint.config.block_size - 1
    if spec_config.max_draft_len != drafted:
        raise UsageError(
            "This drafter proposes whole blocks",
            where="speculative_config.max_draft_len",
            got=spec_config.max_draft_len,
            expected=f"{drafted} (block size - 1)",
            fix=f"set max_draft_len and block_size to {drafted} in config.yaml",
        )
    ordered, taps = sorted(checkpoint.config.target_layer_ids), getattr(spec_config, "target_layer_ids", None)
    if taps is not None and sorted(taps) != ordered:
        raise UsageError(
            "TensorRT-LLM captures other target layers than the drafter was trained with",
            where="speculative_config.target_layer_ids",
            got=list(taps),
            expected=list(checkpoint.config.target_layer_ids),
            fix="leave target_layer_ids out: TensorRT-LLM reads it from the drafter's config.json",
        )
