"""Several drafters trained in lock-step: one pass of the target per batch, then one step of every arm on the very same blocks.

Sharing is what makes an arm cheap: hidden states, the target's probabilities of every predicting row, masks and rotary tables are
computed once, and all arms see the same sequences, anchors and replaced blocks by construction. On a GPU the whole step - target, every
arm's forward and backward pass and its optimiser - is captured in one CUDA graph per batch width and replayed.

Symbols: N sequences, M blocks per sequence, B rows of a block, T padded length, A taps, d hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tools.training.arms import Arm
from tools.training.blocks import cut_blocks, sample_anchors
from tools.training.data import Batch, Corpus, gather
from tools.training.drafter import DrafterShape, Rope, TrainDrafter, block_bias
from tools.training.graph_optimiser import GraphOptimiser
from tools.training.objective import Objective, Targets, block_targets
from tools.training.target import Target


@dataclass
class Learner:
    """One arm in training."""

    arm: Arm
    seed: int
    drafter: TrainDrafter
    objective: Objective
    optimiser: GraphOptimiser
    sums: dict[str, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.arm.letter}{self.seed}"

    def tensors(self) -> list[Tensor]:
        """Everything a resumed training restores."""
        return [*self.drafter.parameters(), *self.optimiser.state()]


@dataclass
class Inputs:
    """Static buffers of one batch; a replayed graph reads them."""

    batch: Batch
    anchors: Tensor  # int64 [N, M]
    replaced: Tensor  # bool [N, M]
    alignment: Tensor  # fp32 scalar
    factor: Tensor  # fp32 scalar, learning rate over its peak
    left: Tensor  # fp32 scalar, what is left of a fading alignment

    def tensors(self) -> list[Tensor]:
        batch = self.batch
        return [batch.ids, batch.prompts, batch.lengths, self.anchors, self.replaced, self.alignment, self.factor, self.left]

    def copy_(self, other: Inputs) -> None:
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(new, non_blocking=True)

    def to(self, device: torch.device) -> Inputs:
        tensors = [t.to(device, copy=True) for t in self.tensors()]
        return Inputs(Batch(*tensors[:3]), *tensors[3:])

    def pinned(self) -> Inputs:
        tensors = [t.pin_memory() for t in self.tensors()]
        return Inputs(Batch(*tensors[:3]), *tensors[3:])


@dataclass(frozen=True)
class Shared:
    """What every arm reads of one batch."""

    embedded: Tensor  # [N, M, B, d]
    scaled: Tensor  # [N, T, A*d] tapped states over their scale
    ids: Tensor  # int64 [N, M, B]
    context_rope: Rope
    block_rope: Rope
    bias: dict[bool, Tensor]  # causal -> [N, 1, M*B, T + M*B]
    targets: Targets


def ordered_batches(corpus: Corpus, size: int, seed: int, widths: Sequence[int], start: int = 0) -> Iterator[Batch]:
    """Endless batches on the CPU, each padded to the smallest of ``widths`` that holds it; the first ``start`` are skipped unread.

    Sequences longer than the widest are left out. Within a random pool sequences are sorted by length, so padding stays small.
    """
    generator = torch.Generator().manual_seed(seed)
    usable = (corpus.lengths <= max(widths)).nonzero()[:, 0]
    if len(usable) < size:
        raise SystemExit(f"{len(usable)} sequences fit into {max(widths)} tokens, a batch needs {size}")
    count = 0
    while True:
        order = usable[torch.randperm(len(usable), generator=generator)]
        order = order[: len(order) // size * size]
        grouped = [chunk[corpus.lengths[chunk].argsort()] for chunk in order.split(32 * size)]
        parts = [part for chunk in grouped for part in chunk.split(size)]
        for index in torch.randperm(len(parts), generator=generator).tolist():
            count += 1
            if count <= start:
                continue
            longest = int(corpus.lengths[parts[index]].max())
            yield gather(corpus, parts[index].tolist(), torch.device("cpu"), min(w for w in widths if w >= longest))


class LockStep:
    """Runs steps of all learners; ``graph`` replays CUDA graphs, otherwise every kernel is launched anew."""

    def __init__(self, learners: Sequence[Learner], target: Target, tap_scale: Tensor, graph: bool) -> None:
        self.learners, self.target, self.tap_scale, self.graph = learners, target, tap_scale, graph
        self.shape: DrafterShape = learners[0].drafter.shape
        self.masks = sorted({learner.drafter.shape.causal for learner in learners})
        self.buffers: dict[int, Inputs] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def share(self, inputs: Inputs) -> Shared:
        """The target's part of a step and all that follows from the batch alone."""
        shape, target, batch = self.shape, self.target, inputs.batch
        tapped, final = target.forward(batch.ids, shape.taps)
        blocks = cut_blocks(batch, inputs.anchors, shape.block_size)
        rows = torch.full_like(blocks.ids, shape.mask_token_id)
        rows[..., 0] = blocks.ids[..., 0]
        count, width = batch.ids.shape
        steps = torch.arange(width, device=target.device).expand(count, -1)
        any_drafter = self.learners[0].drafter
        blocks_each = inputs.anchors.shape[1]
        bias = {c: block_bias(inputs.anchors, width, blocks_each, shape.block_size, c).to(target.dtype) for c in self.masks}
        return Shared(
            embedded=target.embed[rows],
            scaled=(tapped.float() / self.tap_scale).to(target.dtype),
            ids=blocks.ids,
            context_rope=any_drafter.rope(steps),
            block_rope=any_drafter.rope(blocks.positions.flatten(1)),
            bias=bias,
            targets=block_targets(blocks, final, target.head, self.learners[0].objective.config.decay),
        )

    def learn(self, learner: Learner, shared: Shared, inputs: Inputs) -> None:
        """Forward, backward and update of one arm; adds its metrics to ``learner.sums``."""
        drafter, device = learner.drafter, self.target.device
        replaced = inputs.replaced if learner.objective.config.replacement > 0 else None
        bias = shared.bias[drafter.shape.causal]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            context = drafter.context(shared.scaled, shared.context_rope)
            output = drafter.run(shared.embedded, context, shared.ids, shared.block_rope, bias, replaced)
            alignment = inputs.alignment * inputs.left if learner.arm.fade else inputs.alignment
            loss, metrics = learner.objective(drafter, output, shared.targets, alignment)
        gradients = torch.autograd.grad(loss, learner.optimiser.parameters, allow_unused=True)
        learner.optimiser.step(gradients, inputs.factor)
        for name, value in {"loss": loss.detach(), **metrics}.items():
            if name not in learner.sums:
                learner.sums[name] = torch.zeros((), device=device)
            learner.sums[name].add_(value)

    def _work(self, inputs: Inputs) -> None:
        shared = self.share(inputs)
        for learner in self.learners:
            self.learn(learner, shared, inputs)

    def step(self, inputs: Inputs) -> None:
        """One step of every learner on ``inputs`` (CPU tensors)."""
        device, width = self.target.device, inputs.batch.ids.shape[1]
        if not self.graph:
            self._work(inputs.to(device))
            return
        if width not in self.buffers:  # a first step of this width runs plainly: kernels get chosen, compiled and warmed up
            self.buffers[width] = inputs.to(device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._work(self.buffers[width])
            torch.cuda.current_stream().wait_stream(stream)
            return
        self.buffers[width].copy_(inputs.pinned())
        if width not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self.graphs.values())).pool() if self.graphs else None
            with torch.cuda.graph(graph, pool=pool):
                self._work(self.buffers[width])
            self.graphs[width] = graph
        self.graphs[width].replay()


def make_inputs(
    batch: Batch, anchors: int, seed: int, step: int, replacement: float, alignment: float, factor: float, left: float = 1.0
) -> Inputs:
    """The random choices of step ``step``, a function of the seed and the step alone: not of the arms that learn together."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    positions = sample_anchors(batch, anchors, generator)
    replaced = torch.rand(positions.shape, generator=generator) < replacement
    return Inputs(batch, positions, replaced, torch.tensor(alignment), torch.tensor(factor), torch.tensor(left))
