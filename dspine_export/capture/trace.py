"""Runs torch.export over an entry point with fake weights and named dynamic dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dspine_export.capture.entries import (
    BATCH,
    CONTEXT,
    ENTRIES,
    TOKENS,
    ContextEntry,
    DraftEntry,
    EntryContract,
    TensorSpec,
    UnaryDraftEntry,
    context_contract,
    draft_contract,
)
from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.errors import BuildError
from dspine_export.model.drafter_model import DrafterModel

MAX_BATCH = 4096
MAX_CONTEXT = 1 << 20
# Sizes torch.export sees: any distinct values above 1, since 0 and 1 are specialised.
EXAMPLE_SIZES = {BATCH: 3, CONTEXT: 11, TOKENS: 5}


@dataclass(frozen=True)
class TracedEntry:
    """An exported entry point. Parameters of `program` are fakes named as in the checkpoint, prefixed ``model.``."""

    program: ExportedProgram
    contract: EntryContract
    config: DrafterConfig
    dtype: torch.dtype


def trace_entries(
    config: DrafterConfig, dtype: torch.dtype, entries: tuple[str, ...] = ENTRIES
) -> dict[str, TracedEntry]:
    """Entry points by name. dtype: float32 or bfloat16."""
    draft_module = DraftEntry if config.transfer is not None else UnaryDraftEntry
    pairs = ((context_contract(config), ContextEntry), (draft_contract(config), draft_module))
    return {c.name: _trace(c, module, config, dtype) for c, module in pairs if c.name in entries}


def _trace(contract: EntryContract, entry: type, config: DrafterConfig, dtype: torch.dtype) -> TracedEntry:
    limits = {BATCH: MAX_BATCH, CONTEXT: MAX_CONTEXT, TOKENS: MAX_CONTEXT}
    dims = {name: Dim(name, min=1, max=limit) for name, limit in limits.items()}
    shapes = tuple(
        {axis: dims[d] for axis, d in enumerate(spec.shape) if isinstance(d, str)} for spec in contract.inputs
    )
    try:
        with FakeTensorMode(shape_env=ShapeEnv()), _default_dtype(dtype):
            module = entry(DrafterModel(config)).eval().requires_grad_(False)
            example = tuple(_example(spec, dtype) for spec in contract.inputs)
        program = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise BuildError(
            "torch.export could not trace the drafter", where=f"{contract.name} entry", got=str(error)[:2000]
        ) from error
    return TracedEntry(program, contract, config, dtype)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Fake parameters cannot be converted after construction, so they are created in the compute dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _example(spec: TensorSpec, dtype: torch.dtype) -> torch.Tensor:
    shape = tuple(EXAMPLE_SIZES[d] if isinstance(d, str) else d for d in spec.shape)
    kind = dtype if spec.dtype == "T" else getattr(torch, spec.dtype)
    return torch.zeros(shape, dtype=kind)
