"""The public DSpine objective on a batch of blocks.

    backbone     0.1 CE(label) + 0.9 |p_draft - p_target|_1                     over the whole vocabulary
    refinement   the same on the K candidates, scored with the TRUE predecessor; p_target renormalised on the candidates
    alignment    1 - cos(phi_l(h_i), code of the token at slot i)               every layer, scaled by the detached CE, warmed up

Each slot i counts exp(-(i-1)/7). The head is frozen and large, so its loss and the gradient of its input are computed together, a
chunk of rows at a time, and no [rows, V] tensor outlives its chunk.

Symbols: R predicting rows, V vocabulary, K candidates, d hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.training.blocks import Blocks, rows_before, slot_weights
from tools.training.drafter import DraftPass, TrainDrafter

CHUNK_ROWS = 4096
SMALLEST_MASS = 1e-4  # candidates that hold less of the target's probability say nothing about its shape


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights of the objective and its switches."""

    ce_weight: float = 0.1
    alignment_weight: float = 0.5
    alignment_warmup: float = 0.04  # share of the run
    replacement: float = 0.5  # probability of a block's predecessors being replaced at the start
    replacement_hold: float = 1 / 6  # share of the run at full probability
    replacement_end: float = 1 / 3  # share of the run after which it is 0
    decay: float = 7.0
    refine: bool = True
    align: bool = True

    def schedule(self, progress: float) -> tuple[float, float]:
        """(alignment weight, replacement probability) at ``progress`` in [0, 1]."""
        warm = min(progress / self.alignment_warmup, 1.0) if self.alignment_warmup else 1.0
        left = (self.replacement_end - progress) / (self.replacement_end - self.replacement_hold)
        return self.alignment_weight * warm, self.replacement * min(max(left, 0.0), 1.0)


class HeadTerms(NamedTuple):
    """Per-row results of the frozen head; only ``loss`` carries a gradient."""

    loss: Tensor  # scalar, sum over rows of weight * (ce_weight CE + (1 - ce_weight) L1)
    ce: Tensor  # [R]
    l1: Tensor  # [R]
    candidates: Tensor  # [R, K]
    teacher: Tensor  # [R, K] target probability of the candidates
    teacher_top: Tensor  # [R] target's own argmax


def head_product(rows: Tensor, head: Tensor) -> Tensor:
    """fp32 ``rows @ head.T``; on CUDA the operands stay in bfloat16 and the accumulator is not rounded."""
    if rows.is_cuda and head.dtype == torch.bfloat16:
        return torch.mm(rows.to(head.dtype), head.T, out_dtype=torch.float32)
    return rows.float() @ head.float().T


def _chunk_terms(draft: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor, ce_weight: float) -> tuple[Tensor, ...]:
    """CE, L1 and the gradient of their weighted sum with respect to the draft logits; [c, V] fp32 in, bfloat16 gradient out."""
    p, q = draft.softmax(-1), teacher.softmax(-1)
    ce = torch.logsumexp(draft, -1) - draft.gather(-1, labels[:, None])[:, 0]
    gap = p - q
    l1 = gap.abs().sum(-1)
    slope = p * gap.sign()  # d L1 / d logits = p (sign - <p, sign>)
    columns = torch.arange(draft.shape[-1], device=draft.device)
    gradient = ce_weight * (p - (columns == labels[:, None]).float())
    gradient = gradient + (1 - ce_weight) * (slope - p * slope.sum(-1, keepdim=True))
    return ce, l1, (weights[:, None] * gradient).to(torch.bfloat16 if draft.is_cuda else torch.float32)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, teacher_hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, ce_weight: float, top_k: int,
        terms: Callable[..., tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        parts: list[tuple[Tensor, ...]] = []
        gradients = []
        for start in range(0, hidden.shape[0], CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            draft, teacher = head_product(hidden[part], head), head_product(teacher_hidden[part], head)
            ce, l1, gradient = terms(draft, teacher, labels[part], weights[part], ce_weight)
            gradients.append(gradient.to(head.dtype) @ head)
            candidates = draft.topk(top_k, -1).indices
            probability = (teacher.gather(-1, candidates) - teacher.logsumexp(-1, keepdim=True)).exp()
            parts.append((ce, l1, candidates, probability, teacher.argmax(-1)))
        ce, l1, candidates, probability, top = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(torch.cat(gradients))
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(ce, l1, candidates, probability, top)
        loss = (weights * (ce_weight * ce + (1 - ce_weight) * l1)).sum()
        return loss, ce, l1, candidates, probability, top

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return (grad * gradient.to(ctx.dtype), None, None, None, None, None, None, None)


class Objective:
    """The loss of one step; ``compiled`` fuses the vocabulary-wide arithmetic (worth it on a GPU only)."""

    def __init__(self, config: ObjectiveConfig, head: Tensor, compiled: bool = False) -> None:
        self.config, self.head = config, head
        self._terms = torch.compile(_chunk_terms) if compiled else _chunk_terms

    def __call__(
        self, drafter: TrainDrafter, output: DraftPass, blocks: Blocks, teacher_hidden: Tensor, alignment: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss per weighted slot, and detached metrics.

        Args:
            teacher_hidden: [N, T, d] the target's final normed hidden states.
            alignment: current alignment weight.
        """
        config = self.config
        weights = slot_weights(blocks.valid, config.decay).flatten()  # [R]
        labels, predecessors = blocks.ids[..., 1:].flatten(), blocks.ids[..., :-1].flatten()
        rows = output.hidden[..., 1:, :].flatten(0, -2)
        teacher = rows_before(teacher_hidden, blocks.positions).flatten(0, -2)
        head = HeadTerms(
            *_HeadLoss.apply(rows, teacher, self.head, labels, weights, config.ce_weight, drafter.shape.top_k, self._terms)
        )
        total = weights.sum().clamp_min(1.0)
        loss = head.loss
        known = (weights > 0).float()
        metrics = {
            "ce": (head.ce * weights).sum() / total,
            "l1": (head.l1 * weights).sum() / total,
            "top1": ((head.candidates[:, 0] == labels) * known).sum() / known.sum(),
            "coverage": ((head.candidates == labels[:, None]).any(-1) * known).sum() / known.sum(),
        }
        if config.refine:
            refined, right = self._refinement(drafter, output, head, labels, predecessors)
            loss = loss + (refined * weights).sum()
            metrics |= {"refined": (refined * weights).sum().detach() / total, "refined_top1": (right * known).sum() / known.sum()}
        if config.align and drafter.shape.inject and alignment > 0:
            distance = self._alignment(drafter, output, labels)
            loss = loss + alignment * metrics["ce"].detach() * (distance * weights).sum()
            metrics["alignment"] = (distance * weights).sum().detach() / (total * drafter.shape.num_layers)
        return loss / total, metrics

    def _refinement(
        self, drafter: TrainDrafter, output: DraftPass, head: HeadTerms, labels: Tensor, predecessors: Tensor
    ) -> tuple[Tensor, Tensor]:
        refined = drafter.refine(output.pre_injection[..., 1:, :].flatten(0, -2), predecessors)
        choices = F.embedding(head.candidates, self.head).float()  # [R, K, d]
        with torch.autocast(refined.device.type, enabled=False):
            scores = torch.einsum("rd,rkd->rk", refined.float(), choices)
        log_p = scores.log_softmax(-1)
        mass = head.teacher.sum(-1, keepdim=True)
        covered = head.candidates == labels[:, None]  # the label may be missing: then there is no CE, only the shape
        ce = -(log_p * covered).sum(-1)
        l1 = (log_p.exp() - head.teacher / mass.clamp_min(1e-30)).abs().sum(-1) * (mass[:, 0] > SMALLEST_MASS)
        right = head.candidates.gather(-1, scores.argmax(-1, keepdim=True))[:, 0] == labels
        return self.config.ce_weight * ce + (1 - self.config.ce_weight) * l1, right

    @staticmethod
    def _alignment(drafter: TrainDrafter, output: DraftPass, labels: Tensor) -> Tensor:
        """1 - cosine, summed over layers, [R]."""
        codes = F.embedding(labels, drafter.codes)
        distances = []
        for layer, hidden in enumerate(output.layer_outputs):
            feature = drafter.injection.feature(hidden[..., 1:, :].flatten(0, -2), layer) / drafter.injection.scale
            distances.append(1 - (feature * codes).sum(-1))
        return torch.stack(distances).sum(0)
