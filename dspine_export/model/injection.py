"""Gated adjacent injection: every slot's predicted feature is written into its successor.

Symbols follow the paper: R_l readouts, Wr_l writes, M message, G_r receiver gate, G_p predecessor gate, b bias. The four shared
weights and the per-layer lists carry the checkpoint's names.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspine_export.checkpoint.config import DrafterConfig
from dspine_export.model.norm import normalise, vector_norm


class AdjacentInjection(nn.Module):
    """The weights of the injection and the three computations built from them."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        assert config.transfer is not None
        d, r, m = config.hidden_size, config.transfer.rank, config.transfer.message_size
        self.rank = r
        self.readouts = nn.ModuleList(nn.Linear(d, r, bias=False) for _ in range(config.num_layers))
        self.writes = nn.ModuleList(nn.Linear(m, d, bias=False) for _ in range(config.num_layers))
        self.message = nn.Linear(r, m, bias=False)
        self.receiver_gate = nn.Linear(r, m, bias=False)
        self.predecessor_gate = nn.Linear(r, m, bias=False)
        self.bias = nn.Parameter(torch.zeros(m))

    def write_weight(self, layer: int) -> Tensor:
        """Wr_l [d, m]; negative indices count from the last layer."""
        weight = self.writes[layer].weight
        assert isinstance(weight, Tensor)
        return weight

    def readout_weight(self, layer: int) -> Tensor:
        """R_l [r, d]."""
        weight = self.readouts[layer].weight
        assert isinstance(weight, Tensor)
        return weight

    def known_feature(self, codes: Tensor) -> Tensor:
        """Feature of a known token, sqrt(r) c_v. codes [..., r]"""
        return codes * math.sqrt(self.rank)

    def predicted_feature(self, layer: int, hidden: Tensor) -> Tensor:
        """phi_l(h) = sqrt(r) normalise(R_l h), normalised in float32. hidden [N, B, d] -> [N, B, r]"""
        return predicted_feature(hidden, self.readout_weight(layer))

    def forward(self, layer: int, hidden: Tensor, feature: Tensor, anchor_feature: Tensor) -> Tensor:
        """Writes slot i-1 into slot i; slot 0 (the anchor) is copied.

        Args:
            hidden: [N, B, d] output of the whole decoder layer.
            feature: [N, B, r] predicted feature of every slot, before any injection of this layer.
            anchor_feature: [N, r] known feature of the anchor token, the predecessor of slot 1.

        Returns:
            [N, B, d]
        """
        return inject(
            hidden,
            feature,
            torch.cat((self.message(anchor_feature), self.predecessor_gate(anchor_feature)), dim=-1),
            self.message.weight,
            self.receiver_gate.weight,
            self.predecessor_gate.weight,
            self.bias,
            self.write_weight(layer),
        )


def predicted_feature(hidden: Tensor, readout_weight: Tensor) -> Tensor:
    """phi(h) = sqrt(r) normalise(R h), normalised in float32. hidden [..., d], readout_weight [r, d] -> [..., r]"""
    readout = F.linear(hidden, readout_weight)
    return (normalise(readout) * math.sqrt(readout.shape[-1])).to(hidden.dtype)


def inject(
    hidden: Tensor,
    feature: Tensor,
    anchor_message: Tensor,
    message_weight: Tensor,
    receiver_gate_weight: Tensor,
    predecessor_gate_weight: Tensor,
    gate_bias: Tensor,
    write_weight: Tensor,
) -> Tensor:
    """Reference of the operator ``dspine::adjacent_injection``; operand shapes as in `ops_schema.ADJACENT_INJECTION`."""
    m = message_weight.shape[0]
    predicted = feature[:, 1:-1]  # predecessors of slots 2 .. B-1
    message = torch.cat((anchor_message[:, :m].unsqueeze(1), F.linear(predicted, message_weight)), dim=1)  # [N, B-1, m]
    gate_in = torch.cat((anchor_message[:, m:].unsqueeze(1), F.linear(predicted, predecessor_gate_weight)), dim=1)
    gate = torch.sigmoid(F.linear(feature[:, 1:], receiver_gate_weight) + gate_in + gate_bias)
    receiver = hidden[:, 1:]
    written = receiver + write(receiver, gate * message, write_weight)
    return torch.cat((hidden[:, :1], written), dim=1)


def write(receiver: Tensor, gated_message: Tensor, write_weight: Tensor) -> Tensor:
    """(|h|/sqrt(d)) Wr z, in the receiver's dtype. receiver [..., d], gated_message [..., m] -> [..., d]"""
    scale = vector_norm(receiver) / math.sqrt(receiver.shape[-1])
    update = F.linear(gated_message, write_weight)
    return (scale * update).to(receiver.dtype)
