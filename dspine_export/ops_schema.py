"""The three DSpine operators, declared once.

`torch.library`, the ONNX domain ``dspine`` version 1 and the C++ plugin creators are all generated from, or checked against, this
table, so that an operand added in one place cannot be forgotten in another. Maths: adjacent injection, transition scores and
lattice walk of the DSpine algorithm (Zhang et al. 2026).

Symbols: N batch, B block size, d hidden size, r transfer rank, m message size, K candidates, V vocabulary rows. Element type "T" is
the compute type (float32 or bfloat16).
"""

from __future__ import annotations

from dataclasses import dataclass

DOMAIN = "dspine"
VERSION = 1


@dataclass(frozen=True)
class Operand:
    """One tensor operand: name, element type ("T", "float32" or "int64") and symbolic shape."""

    name: str
    dtype: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class OpSchema:
    """One operator: ONNX ``op_type`` (also the plugin name), torch name, operands and float attributes."""

    op_type: str
    torch_name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attributes: tuple[str, ...] = ()
    doc: str = ""


ADJACENT_INJECTION = OpSchema(
    op_type="AdjacentInjection",
    torch_name="adjacent_injection",
    inputs=(
        Operand("hidden", "T", ("N", "B", "d")),
        Operand("feature", "T", ("N", "B", "r")),
        Operand("anchor_message", "T", ("N", "2*m")),
        Operand("message_weight", "T", ("m", "r")),
        Operand("receiver_gate_weight", "T", ("m", "r")),
        Operand("predecessor_gate_weight", "T", ("m", "r")),
        Operand("gate_bias", "T", ("m",)),
        Operand("write_weight", "T", ("d", "m")),
    ),
    outputs=(Operand("injected", "T", ("N", "B", "d")),),
    doc="Writes each slot's gated predecessor message into the slot; slot 0 is copied.",
)

TRANSITION_SCORES = OpSchema(
    op_type="TransitionScores",
    torch_name="transition_scores",
    inputs=(
        Operand("pre_injection", "T", ("N", "B-1", "d")),
        Operand("receiver_gate", "T", ("N", "B-1", "m")),
        Operand("anchor_ids", "int64", ("N",)),
        Operand("candidate_ids", "int64", ("N", "B-1", "K")),
        Operand("token_table", "T", ("V", "2*m")),
        Operand("write_weight", "T", ("d", "m")),
        Operand("norm_weight", "T", ("d",)),
        Operand("lm_head", "T", ("V", "d")),
    ),
    outputs=(Operand("transition_scores", "float32", ("N", "B-1", "K", "K")),),
    attributes=("eps",),
    doc="Scores every (predecessor, successor) pair of adjacent candidates by redoing the last write with the predecessor's code.",
)

LATTICE_WALK = OpSchema(
    op_type="LatticeWalk",
    torch_name="lattice_walk",
    inputs=(
        Operand("transition_scores", "float32", ("N", "B-1", "K", "K")),
        Operand("candidate_ids", "int64", ("N", "B-1", "K")),
        Operand("temperature", "float32", ("N",)),
        Operand("uniforms", "float32", ("N", "B-1")),
    ),
    outputs=(
        Operand("tokens", "int64", ("N", "B-1")),
        Operand("q", "float32", ("N", "B-1", "K")),
    ),
    doc="Walks the candidate lattice: greedy where temperature is 0, by inverse CDF elsewhere; returns the rows it sampled from.",
)

OPS: tuple[OpSchema, ...] = (ADJACENT_INJECTION, TRANSITION_SCORES, LATTICE_WALK)
