"""A bundle's engine in TensorRT or TensorRT-RTX.

Executed on an H200 with TensorRT-RTX 1.6.1 and plugin-free graphs; a plan with our plugins, and TensorRT proper, never were.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dspine_export.bundle import Bundle, EngineEntry
from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import DependencyError, UsageError
from dspine_export.lowering.engine.backend import Backend, open_backend
from dspine_export.lowering.engine.gpu import device_compute_capability
from dspine_export.lowering.engine.plugin_library import load_plugin_library
from dspine_export.model.output import DraftOutput
from dspine_export.model.state import DraftState
from dspine_export.runtime.executor import CachedExecutor
from dspine_export.runtime.onnx_executor import draft_output
from dspine_export.runtime.plan_check import CheckedEngine, choose_engine, rebuild_command
from dspine_export.runtime.plan_runner import PlanRunner, load_plan


class TensorrtExecutor(CachedExecutor):
    """Runs the context and draft plans; cache, embedding and head are torch CUDA tensors bound by address, never copied.

    Args:
        embed_tokens, lm_head: the target's [V, d] on the GPU, in the plan's compute dtype.
    """

    name = "tensorrt"

    def __init__(
        self,
        config: DrafterConfig,
        engine: EngineEntry,
        plans: dict[str, PlanRunner],
        embed_tokens: Tensor,
        lm_head: Tensor,
    ) -> None:
        self._context, self._draft = plans["context"], plans["draft"]
        compute = self._draft.dtypes["keys"]
        if embed_tokens.dtype != compute:
            fix = f"open the target with --dtype {str(compute).removeprefix('torch.')}"
            raise UsageError("The engine computes in another dtype", got=embed_tokens.dtype, expected=compute, fix=fix)
        profile = engine.profile
        super().__init__(
            config,
            embed_tokens,
            min_context=profile.context.min,
            max_context=profile.context.max,
            max_batch=profile.batch.max,
            max_tokens=profile.tokens.max,
        )
        self._min_tokens = profile.tokens.min
        self._tables = {"embed_tokens": embed_tokens.contiguous(), "lm_head": lm_head.contiguous()}

    def project(self, target_hidden: Tensor, start_positions: Tensor) -> tuple[Tensor, Tensor]:
        tokens = target_hidden.shape[1]
        if tokens < self._min_tokens:  # the profile's smallest call; rows beyond the real ones are cut off again
            target_hidden = F.pad(target_hidden, (0, 0, 0, self._min_tokens - tokens))
        out = self._context.run({"target_hidden": target_hidden, "start_positions": start_positions})
        return out["new_keys"][:, :, :, :tokens], out["new_values"][:, :, :, :tokens]

    @torch.no_grad()
    def draft(self, state: DraftState, anchor_ids: Tensor, temperature: Tensor, uniforms: Tensor) -> DraftOutput:
        feeds = {"anchor_ids": anchor_ids, "context_lengths": state.lengths, "keys": state.keys, "values": state.values}
        return draft_output(self._draft.run(feeds | {"temperature": temperature, "uniforms": uniforms} | self._tables))


def open_tensorrt(bundle: Bundle, config: DrafterConfig, embed_tokens: Tensor, lm_head: Tensor) -> TensorrtExecutor:
    """The engine of `bundle` that fits this machine, with its plugins loaded.

    Raises:
        DependencyError: no GPU, no fitting engine, or the library refuses it. VerificationError: changed files.
        UsageError: the target lies elsewhere or has another dtype.
    """
    checked = choose_engine(bundle, device_compute_capability())
    if not torch.cuda.is_available():
        fix = "install a CUDA build of torch: the engine's buffers are torch tensors"
        raise DependencyError("This torch cannot use the GPU", got=f"torch {torch.__version__}", fix=fix)
    if embed_tokens.device.type != "cuda":
        fix = "open the target with --device cuda"
        raise UsageError("The engine needs the target on the GPU", got=f"device {embed_tokens.device}", fix=fix)
    backend = open_backend(checked.entry.builder)
    load_plugins(bundle, checked, backend)
    device, carries = embed_tokens.device, checked.entry.carries_plugins
    plans = {entry: load_plan(backend, path, device, host_code=carries) for entry, path in checked.plans.items()}
    return TensorrtExecutor(config, checked.entry, plans, embed_tokens, lm_head)


def load_plugins(bundle: Bundle, checked: CheckedEngine, backend: Backend) -> None:
    """What the plans of an engine call, into this process; nothing where they call nothing or carry it themselves.

    Raises:
        DependencyError: the bundle does not hold it, or it cannot be registered.
    """
    if not checked.has_plugins:
        return
    library = checked.entry.plugin_library
    if library is None:
        raise DependencyError(
            "The engine needs plugins that its bundle does not hold",
            where=bundle.file(checked.entry.id),
            fix=rebuild_command(bundle),
        )
    load_plugin_library(backend.module, bundle.file(library), tensorrt_major=backend.tensorrt_major)
