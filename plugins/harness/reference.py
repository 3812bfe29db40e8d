"""The three operators written straight from their formulas, in float64: the oracle of the kernels.

Operands come in the order and with the shapes of the operator schema. Nothing is shared with the kernels or the exported model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def adjacent_injection(operands: Sequence[Tensor]) -> Tensor:
    """h_i + |h_i|/sqrt(d) * Wr (sigmoid(G_r f_i + G_p p_i + b) * M p_i) for i >= 1, slot 0 unchanged; float64 [N, B, d]."""
    hidden, feature, anchor, w_message, w_receiver, w_predecessor, bias, w_write = (x.double() for x in operands)
    m = w_message.shape[0]
    out = hidden.clone()
    for slot in range(1, hidden.shape[1]):
        if slot == 1:
            message, predecessor = anchor[:, :m], anchor[:, m:]
        else:
            message, predecessor = feature[:, slot - 1] @ w_message.T, feature[:, slot - 1] @ w_predecessor.T
        gate = torch.sigmoid(feature[:, slot] @ w_receiver.T + predecessor + bias)
        out[:, slot] += _scale(hidden[:, slot]) * ((gate * message) @ w_write.T)
    return out


def transition_scores(operands: Sequence[Tensor], eps: float) -> Tensor:
    """<RMSNorm(pre + |pre|/sqrt(d) Wr z_k), W_j> for every predecessor k and candidate j; float64 [N, B-1, K, K].

    Ids outside the vocabulary are clamped, which the model never needs.
    """
    pre, receiver, anchors, candidates, table, w_write, gamma, head = operands
    last = head.shape[0] - 1
    anchors, candidates = anchors.clamp(0, last), candidates.clamp(0, last)
    m = w_write.shape[1]
    slots = []
    for slot in range(pre.shape[1]):
        previous = anchors[:, None].expand_as(candidates[:, 0]) if slot == 0 else candidates[:, slot - 1]  # [N, K]
        rows = table[previous].double()  # [N, K, 2m]
        z = torch.sigmoid(receiver[:, slot, None].double() + rows[..., m:]) * rows[..., :m]
        h = pre[:, slot, None].double()  # [N, 1, d]
        y = h + _scale(h) * (z @ w_write.double().T)
        y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + eps) * gamma.double()
        slots.append(y @ head[candidates[:, slot]].double().transpose(-1, -2))
    return torch.stack(slots, dim=1)


def walk_is_consistent(operands: Sequence[Tensor], tokens: Tensor, q: Tensor, tolerance: float) -> str | None:
    """Checks a walk step by step against its own choices; None, or what is wrong.

    The rows `q` must be the softmax (within `tolerance`) or exactly one-hot, and each token must follow exactly from the row beside it,
    by the lowest argmax or by the float32 cumulative sum that torch computes on the CPU.
    """
    scores, candidates, temperature, uniforms, tokens, q = (x.cpu() for x in (*operands, tokens, q))
    for n in range(scores.shape[0]):
        index = 0
        for slot in range(scores.shape[1]):
            row = scores[n, slot, index]
            if temperature[n] > 0:
                wanted = torch.softmax(row.double() / temperature[n].double(), dim=-1)
                above = (q[n, slot].cumsum(-1) > uniforms[n, slot]).nonzero()
                index = int(above[0]) if above.numel() else row.numel() - 1
            else:
                index = int((row == row.max()).nonzero()[0])
                wanted = torch.nn.functional.one_hot(torch.tensor(index), row.numel()).double()
            error = float((q[n, slot].double() - wanted).abs().max())
            if not error <= (tolerance if temperature[n] > 0 else 0.0):
                return f"q of sequence {n}, slot {slot + 1} is off by {error:.3g}"
            if int(tokens[n, slot]) != int(candidates[n, slot, index]):
                return f"token of sequence {n}, slot {slot + 1} is not its row's choice"
    return None


def _scale(hidden: Tensor) -> Tensor:
    return hidden.square().mean(-1, keepdim=True).sqrt()
