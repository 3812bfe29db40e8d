"""The public DSpine objective on a batch of blocks.

    backbone     0.1 CE(label) + 0.9 |p_draft - p_target|_1                     over the whole vocabulary
    refinement   the same on the K candidates, scored with the TRUE predecessor; p_target renormalised on the candidates (or as it is)
    alignment    1 - cos(phi_l(h_i), code of the token at slot i)               every layer, scaled by the detached CE, warmed up

Each slot i counts exp(-(i-1)/7). The head is large, so its loss and the gradients of its inputs are computed together, a chunk of rows
at a time, and no fp32 [rows, V] tensor outlives its chunk. The target's probabilities are computed once per batch, whatever the
number of drafters that learn from it.

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
GROUP = 128  # columns of a row that share a maximum in the search for its largest entries
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
    whole: bool = False  # the refinement's L1 is to p itself, where the proposal is 0 off the candidates

    def schedule(self, progress: float) -> tuple[float, float]:
        """(alignment weight, replacement probability) at ``progress`` in [0, 1]."""
        warm = min(progress / self.alignment_warmup, 1.0) if self.alignment_warmup else 1.0
        left = (self.replacement_end - progress) / (self.replacement_end - self.replacement_hold)
        return self.alignment_weight * warm, self.replacement * min(max(left, 0.0), 1.0)

    @staticmethod
    def left(progress: float) -> float:
        """What is left at ``progress`` of an alignment loss that falls to 0 over the second half of the run."""
        return min(2 * (1 - progress), 1.0)


class Targets(NamedTuple):
    """What the predicting rows of one batch must learn; the same for every drafter."""

    labels: Tensor  # int64 [R]
    predecessors: Tensor  # int64 [R] true token at the slot before
    weights: Tensor  # fp32 [R]
    teacher: Tensor  # [R, V] target probabilities, bfloat16 on a GPU


class HeadTerms(NamedTuple):
    """Per-row results of the head; only ``loss`` carries a gradient."""

    loss: Tensor  # scalar, sum over rows of weight * (ce_weight CE + (1 - ce_weight) L1)
    ce: Tensor  # [R]
    l1: Tensor  # [R]
    candidates: Tensor  # [R, K] by descending logit


def head_product(rows: Tensor, head: Tensor) -> Tensor:
    """fp32 ``rows @ head.T``; on CUDA the operands stay in bfloat16 and the accumulator is not rounded."""
    if rows.is_cuda and head.dtype == torch.bfloat16:
        return torch.mm(rows.to(head.dtype), head.T, out_dtype=torch.float32)
    return rows.float() @ head.float().T


def chunks(rows: int) -> list[slice]:
    """``rows`` in equal parts of at most `CHUNK_ROWS` where that divides, so that a compiled function sees few shapes."""
    size = -(-rows // -(-rows // CHUNK_ROWS))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


@torch.no_grad()
def block_targets(blocks: Blocks, teacher_hidden: Tensor, head: Tensor, decay: float) -> Targets:
    """Targets of ``blocks``; ``teacher_hidden`` [N, T, d] are the target's final normed states."""
    rows = rows_before(teacher_hidden, blocks.positions).flatten(0, -2)
    teacher = torch.empty(rows.shape[0], head.shape[0], dtype=head.dtype, device=head.device)
    for part in chunks(rows.shape[0]):
        teacher[part] = head_product(rows[part], head).softmax(-1)
    weights = slot_weights(blocks.valid, decay).flatten()
    return Targets(blocks.ids[..., 1:].flatten(), blocks.ids[..., :-1].flatten(), weights, teacher)


def top_candidates(logits: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` largest entries of every row by descending value, [R, count].

    The largest entries all lie in the ``count`` groups with the largest maxima, so most of a wide row is read once.
    """
    if logits.shape[-1] % GROUP or logits.shape[-1] < 2 * GROUP * count:
        return logits.topk(count, -1).indices
    groups = logits.unflatten(-1, (-1, GROUP))
    best = groups.amax(-1).topk(count, -1).indices.sort(-1).values  # [R, count]
    inside = groups.gather(1, best[..., None].expand(-1, -1, GROUP)).flatten(1).topk(count, -1).indices
    return best.gather(1, inside // GROUP) * GROUP + inside % GROUP


def chunk_terms(ce_weight: float) -> Callable[..., tuple[Tensor, ...]]:
    """CE, L1 and the gradient of their weighted sum with respect to the draft logits, as a function of one chunk.

    The function takes draft logits fp32 [c, V], teacher probabilities [c, V], labels and weights [c]; its gradient is bfloat16 on CUDA.
    """

    def terms(draft: Tensor, teacher: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        p, total = draft.softmax(-1), torch.logsumexp(draft, -1)
        ce = total - draft.gather(-1, labels[:, None])[:, 0]
        columns = torch.arange(draft.shape[-1], device=draft.device)
        gradient = ce_weight * (p - (columns == labels[:, None]).float())
        l1 = torch.zeros_like(ce)
        if ce_weight < 1:
            gap = p - teacher.float()
            l1 = gap.abs().sum(-1)
            slope = p * gap.sign()  # d L1 / d logits = p (sign - <p, sign>)
            gradient = gradient + (1 - ce_weight) * (slope - p * slope.sum(-1, keepdim=True))
        return ce, l1, (weights[:, None] * gradient).to(torch.bfloat16 if draft.is_cuda else torch.float32)

    return terms


class _HeadLoss(torch.autograd.Function):
    """``tail`` [V, t] are trained columns beside the frozen head's: ``hidden`` then has t columns more."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, tail: Tensor | None, head: Tensor, targets: Targets, ce_weight: float, top_k: int,
        terms: Callable[..., tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        full = head if tail is None else torch.cat((head, tail.to(head.dtype)), dim=1)
        parts: list[tuple[Tensor, ...]] = []
        gradients, tail_gradient = [], None if tail is None else torch.zeros_like(tail)
        for part in chunks(hidden.shape[0]):
            rows = hidden[part]
            draft = head_product(rows, full)
            ce, l1, gradient = terms(draft, targets.teacher[part], targets.labels[part], targets.weights[part])
            gradient = gradient.to(head.dtype)
            gradients.append(gradient @ full)
            if tail_gradient is not None:
                tail_gradient += gradient.T @ rows[:, head.shape[1] :].to(head.dtype)
            parts.append((ce, l1, top_candidates(draft, top_k)) if top_k else (ce, l1))
        ce, l1, *found = (torch.cat(column) for column in zip(*parts, strict=True))
        candidates = found[0] if found else targets.labels[:, None]
        ctx.save_for_backward(torch.cat(gradients), *([] if tail_gradient is None else [tail_gradient]))
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(ce, l1, candidates)
        loss = (targets.weights * (ce_weight * ce + (1 - ce_weight) * l1)).sum()
        return loss, ce, l1, candidates

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        gradient, *tail = ctx.saved_tensors
        return (grad * gradient.to(ctx.dtype), grad * tail[0] if tail else None, None, None, None, None, None)


def candidate_scores(drafter: TrainDrafter, output: DraftPass, candidates: Tensor, predecessors: Tensor, head: Tensor) -> Tensor:
    """fp32 scores [R, K] of ``candidates`` [R, K] after the tokens ``predecessors`` [R]: refinement, or an ancestor's pair head."""
    extra: Tensor | float = 0.0
    if drafter.pair is None:
        queries = drafter.refine(output.pre_injection[..., 1:, :].flatten(0, -2), predecessors)
    else:
        queries = output.hidden[..., 1:, :].flatten(0, -2)
        query = drafter.pair.query(queries, predecessors)
        extra = (query.float()[:, None] * drafter.pair.following_rows(candidates).float()).sum(-1)
    choices = F.embedding(candidates, head).float()  # [R, K, d]
    with torch.autocast(queries.device.type, enabled=False):
        return torch.einsum("rd,rkd->rk", queries.float(), choices) + extra


class Objective:
    """The loss of one step; ``compiled`` fuses the vocabulary-wide arithmetic (worth it on a GPU only).

    ``candidates`` off skips the search for the K best tokens where neither the loss nor the metrics need it.
    """

    def __init__(self, config: ObjectiveConfig, head: Tensor, compiled: bool = False, candidates: bool = True) -> None:
        self.config, self.head, self.candidates = config, head, candidates or config.refine
        terms = chunk_terms(config.ce_weight)
        self._terms = torch.compile(terms, dynamic=False) if compiled else terms

    def __call__(
        self, drafter: TrainDrafter, output: DraftPass, targets: Targets, alignment: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss per weighted slot, and detached metrics; ``alignment`` is the current weight of the alignment loss."""
        config, pair = self.config, drafter.pair
        rows, tail = output.hidden[..., 1:, :].flatten(0, -2), None
        full = rows
        if pair is not None and pair.kind == "markov":
            full, tail = torch.cat((rows, pair.query(rows, targets.predecessors).to(rows.dtype)), dim=-1), pair.following
        top_k = drafter.shape.top_k if self.candidates else 0
        head = HeadTerms(*_HeadLoss.apply(full, tail, self.head, targets, config.ce_weight, top_k, self._terms))
        weights, labels = targets.weights, targets.labels
        total = weights.sum().clamp_min(1.0)
        loss, known = head.loss, (weights > 0).float()
        metrics = {"ce": (head.ce * weights).sum() / total, "l1": (head.l1 * weights).sum() / total}
        if self.candidates:
            metrics["top1"] = ((head.candidates[:, 0] == labels) * known).sum() / known.sum()
            metrics["coverage"] = ((head.candidates == labels[:, None]).any(-1) * known).sum() / known.sum()
        if config.refine:
            refined, right = self._refinement(drafter, output, head.candidates, targets)
            loss = loss + (refined * weights).sum()
            metrics |= {"refined": (refined * weights).sum().detach() / total, "refined_top1": (right * known).sum() / known.sum()}
        if config.align:
            distance = self._alignment(drafter, output, labels)
            loss = loss + alignment * metrics["ce"].detach() * (distance * weights).sum()
            metrics["alignment"] = (distance * weights).sum().detach() / (total * drafter.shape.num_layers)
        return loss / total, metrics

    def _refinement(
        self, drafter: TrainDrafter, output: DraftPass, candidates: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        """Loss [R] on the candidates with the true predecessor, and whether the best candidate is the label."""
        scores = candidate_scores(drafter, output, candidates, targets.predecessors, self.head)
        log_p, teacher = scores.log_softmax(-1), targets.teacher.gather(-1, candidates).float()
        mass = teacher.sum(-1, keepdim=True)
        covered = candidates == targets.labels[:, None]  # the label may be missing: then there is no CE, only the shape
        ce = -(log_p * covered).sum(-1)
        if self.config.whole:
            l1 = (log_p.exp() - teacher).abs().sum(-1) + 1 - mass[:, 0]
        else:
            l1 = (log_p.exp() - teacher / mass.clamp_min(1e-30)).abs().sum(-1) * (mass[:, 0] > SMALLEST_MASS)
        right = candidates.gather(-1, scores.argmax(-1, keepdim=True))[:, 0] == targets.labels
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
