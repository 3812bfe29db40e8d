"""The ordered pass list of each form, and the driver that verifies between passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from dspine_export.capture.trace import TracedEntry
from dspine_export.passes.cleanup import drop_training_only
from dspine_export.passes.fold_tables import fold_transfer_tables
from dspine_export.passes.fuse import fuse_adjacent_injection, fuse_transition
from dspine_export.passes.precision import mark_decomposable_attention, precision_policy
from dspine_export.passes.program import Program, from_traced
from dspine_export.passes.verifier import verify

Form = Literal["fused", "portable"]
Pass = Callable[[Program], Program]

FUSED: tuple[Pass, ...] = (
    drop_training_only,
    fold_transfer_tables,
    fuse_adjacent_injection,
    fuse_transition,
    precision_policy,
    mark_decomposable_attention,
)
# No folding and no fusion: the portable form checks both by not sharing them.
PORTABLE: tuple[Pass, ...] = (drop_training_only, precision_policy, mark_decomposable_attention)

PIPELINES: dict[Form, tuple[Pass, ...]] = {"fused": FUSED, "portable": PORTABLE}


def apply_passes(traced: TracedEntry, form: Form) -> Program:
    """Runs a form's passes over a traced entry.

    Raises:
        BuildError: a pass left the graph invalid; the message names it.
    """
    program = from_traced(traced)
    verify(program, "capture")
    for rewrite in PIPELINES[form]:
        program = rewrite(program)
        verify(program, rewrite.__name__)
    return program
