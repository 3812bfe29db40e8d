"""Runs the plugins on the golden cases: a small drafter's last layer, whose results the public reference implementation computed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from dspine_plugins.harness.binding import HarnessPlugin
from torch import Tensor
from torch.nn import functional as F

SCORE_TOLERANCE = 2e-4
HIDDEN_TOLERANCE = 2e-5


def check_golden(case: Path, harness: Path, library: Path, device: str = "cuda") -> None:
    """Compares injection, transition scores and greedy walk in float32.

    Raises:
        AssertionError: a tensor differs, or a drafted token does.
    """
    from safetensors.torch import load_file

    config = json.loads((case / "drafter" / "config.json").read_text(encoding="utf-8"))
    weights = {name: tensor.to(device) for name, tensor in load_file(case / "drafter" / "model.safetensors").items()}
    io = {name: tensor.to(device) for name, tensor in load_file(case / "io.safetensors").items()}
    layer = config["num_hidden_layers"] - 1
    table = _token_table(weights)
    feature = _feature(weights, layer, io["pre_injection"])

    def run(op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **attributes: float) -> None:
        with HarnessPlugin(harness, library, op, attributes) as plugin:
            size = plugin.configure(inputs, outputs)
            workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
            plugin.enqueue(inputs, outputs, workspace, 0)
            if device == "cuda":
                torch.cuda.synchronize()

    injected = torch.full_like(io["pre_injection"], float("nan"))
    run("AdjacentInjection", _injection_inputs(weights, layer, io, feature, table), [injected])
    wanted = io["layer_outputs"][:, layer]
    assert float((injected - wanted).abs().max()) <= HIDDEN_TOLERANCE * float(wanted.abs().max())

    scores = torch.full_like(io["transition_scores"], float("nan"))
    inputs = _transition_inputs(weights, layer, io, feature, table)
    run("TransitionScores", inputs, [scores], eps=config["rms_norm_eps"])
    assert float((scores - io["transition_scores"]).abs().max()) <= SCORE_TOLERANCE

    ids = io["candidate_ids"].contiguous()
    tokens, q = torch.full_like(ids[..., 0].contiguous(), -1), torch.full(ids.shape, float("nan"), device=device)
    zeros = torch.zeros(ids.shape[:2], device=device)
    run("LatticeWalk", [scores, ids, zeros[:, 0].contiguous(), zeros], [tokens, q])
    assert torch.equal(tokens, io["draft_tokens"])


def _token_table(weights: Mapping[str, Tensor]) -> Tensor:
    """[V, 2m]: M and G_p applied to every token's feature."""
    features = weights["transfer_codes"] * math.sqrt(weights["transfer_codes"].shape[1])
    both = torch.cat((weights["injection.message.weight"], weights["injection.predecessor_gate.weight"]))
    return F.linear(features, both)


def _feature(weights: Mapping[str, Tensor], layer: int, hidden: Tensor) -> Tensor:
    readout = F.linear(hidden, weights[f"injection.readouts.{layer}.weight"])
    return F.normalize(readout, dim=-1) * math.sqrt(readout.shape[-1])


def _injection_inputs(
    weights: Mapping[str, Tensor], layer: int, io: Mapping[str, Tensor], feature: Tensor, table: Tensor
) -> list[Tensor]:
    shared = ("message.weight", "receiver_gate.weight", "predecessor_gate.weight", "bias", f"writes.{layer}.weight")
    operands = [
        io["pre_injection"],
        feature,
        table[io["anchor_ids"]],
        *(weights[f"injection.{name}"] for name in shared),
    ]
    return [operand.contiguous() for operand in operands]


def _transition_inputs(
    weights: Mapping[str, Tensor], layer: int, io: Mapping[str, Tensor], feature: Tensor, table: Tensor
) -> list[Tensor]:
    gate = F.linear(feature[:, 1:], weights["injection.receiver_gate.weight"], weights["injection.bias"])
    operands = [
        io["pre_injection"][:, 1:],
        gate,
        io["anchor_ids"],
        io["candidate_ids"],
        table,
        weights[f"injection.writes.{layer}.weight"],
        weights["norm.weight"],
        io["lm_head.weight"],
    ]
    return [operand.contiguous() for operand in operands]
