"""Train a DSpine drafter for a frozen target on text the target wrote.

    python -m tools.build_prompts --out prompts.jsonl.gz
    python -m tools.write_corpus --target TARGET --prompts prompts.jsonl.gz --out corpus.pt --temperatures 0 0.8
    python -m tools.train_drafter --target TARGET --corpus corpus.pt --out DRAFTER --compile --steps 2300 --lr 4e-3 --anchors 56

The objective is the public recipe (``tools/training/objective.py``). Target hidden states are computed as training goes: the target
runs over a batch of whole sequences, many blocks are cut from each, and the drafter learns all of them in one pass. On a GPU the
target runs in bfloat16 and the drafter under bfloat16 autocast over float32 weights; on a CPU everything is float32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from dspine_export.model.transfer import transfer_codes
from tools.training.blocks import cut_blocks, sample_anchors
from tools.training.checkpoint import save_drafter
from tools.training.codes import principal_directions
from tools.training.data import Batch, batches, load_corpus
from tools.training.drafter import DrafterShape, TrainDrafter, block_bias
from tools.training.objective import Objective, ObjectiveConfig, block_targets
from tools.training.optimiser import advance, build_optimisers, learning_rate
from tools.training.run_log import RunLog
from tools.training.target import Target, load_target


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line; every switch that changes the result is recorded in the log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="Hugging Face directory of the target")
    add("--corpus", type=Path, required=True, help="file written by tools.write_corpus")
    add("--out", type=Path, required=True, help="directory of the drafter to write")
    add("--steps", type=int, default=6000)
    add("--seed", type=int, default=1)
    add("--sequences", type=int, default=64, help="sequences per step")
    add("--anchors", type=int, default=32, help="blocks per sequence")
    add("--optimiser", choices=("adamw", "muon"), default="muon", help="for the matrices; norms and biases always use AdamW")
    add("--lr", type=float, default=2e-3, help="peak learning rate")
    add("--warmup", type=float, default=0.03, help="share of the run")
    add("--layers", type=int, default=4)
    add("--intermediate-size", type=int, default=768)
    add("--heads", type=int, help="query heads (default: the target's)")
    add("--kv-heads", type=int, help="key and value heads (default: the target's)")
    add("--block-size", type=int, default=8)
    add("--top-k", type=int, default=16)
    add("--rank", type=int, default=256)
    add("--message-size", type=int, default=128)
    add("--taps", type=int, nargs="+", default=[1, 8, 15, 22, 28], help="target layers whose output is read, 0-based")
    add("--mask-token-id", type=int, default=16, help="a token the target never writes (SmolLM2: <empty_output>)")
    add("--no-injection", action="store_true", help="train a DFlash backbone: no injection, no refinement, no alignment")
    add("--no-refinement", action="store_true", help="drop the refinement loss")
    add("--no-alignment", action="store_true", help="drop the alignment loss")
    add("--no-replacement", action="store_true", help="never replace predicted predecessors by the true ones")
    add("--bidirectional", action="store_true", help="let block rows see later rows of their block (only with --no-injection)")
    add("--compile", action="store_true", help="fuse the vocabulary-wide loss with torch.compile")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    if arguments.bidirectional and not arguments.no_injection:
        parser.error("--bidirectional needs --no-injection: a DSpine drafter is causal by definition")
    return arguments


def drafter_shape(a: argparse.Namespace, target: Target) -> DrafterShape:
    """The drafter's sizes: the target's where they must agree, the command line's elsewhere."""
    t = target.shape
    return DrafterShape(
        hidden_size=t.hidden_size,
        num_layers=a.layers,
        num_heads=a.heads or t.num_heads,
        num_kv_heads=a.kv_heads or t.num_kv_heads,
        head_dim=t.head_dim,
        intermediate_size=a.intermediate_size,
        vocab_size=t.vocab_size,
        taps=tuple(a.taps),
        block_size=a.block_size,
        mask_token_id=a.mask_token_id,
        rank=a.rank,
        message_size=a.message_size,
        top_k=a.top_k,
        rms_norm_eps=1e-6,
        rope_theta=t.rope_theta,
        causal=not a.bidirectional,
        inject=not a.no_injection,
    )


def build_drafter(shape: DrafterShape, target: Target, seed: int) -> TrainDrafter:
    """A freshly initialised drafter on the target's device, its codes in the canonical basis."""
    torch.manual_seed(seed)
    drafter = TrainDrafter(shape, transfer_codes(target.head, shape.rank))
    drafter.initialise(principal_directions(target.head, shape.rank).float())
    with torch.no_grad():  # the head expects hidden states of this scale
        drafter.norm.weight.copy_(target.weights["model.norm.weight"])
    return drafter.to(target.device)


@torch.no_grad()
def column_scale(target: Target, batch: Batch, taps: tuple[int, ...]) -> Tensor:
    """Root mean square of every tapped column [A*d] over the batch's tokens.

    Late layers are an order of magnitude larger than early ones and a few columns larger still; without this ``fc`` would hear
    only those. The first token is left out: the target parks huge values there.
    """
    tapped, _ = target.forward(batch.ids, taps)
    columns = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    inside = (columns > 0) & (columns < batch.lengths[:, None])
    return tapped[inside].float().square().mean(0).sqrt().clamp_min(1e-3)


def block_loss(
    drafter: TrainDrafter, target: Target, objective: Objective, batch: Batch, anchors: int, progress: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of ``anchors`` random blocks of every sequence of the batch."""
    shape = drafter.shape
    alignment, replacement = objective.config.schedule(progress)
    tapped, final = target.forward(batch.ids, shape.taps)
    blocks = cut_blocks(batch, sample_anchors(batch, anchors), shape.block_size)
    inputs = torch.full_like(blocks.ids, shape.mask_token_id)
    inputs[..., 0] = blocks.ids[..., 0]
    replaced = torch.rand(blocks.anchors.shape, device=target.device) < replacement if replacement > 0 else None
    bias = block_bias(blocks.anchors, batch.ids.shape[1], anchors, shape.block_size, shape.causal)
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
        output = drafter(target.embed[inputs], tapped, blocks.ids, blocks.positions, bias, replaced)
        return objective(drafter, output, block_targets(blocks, final, target.head, objective.config.decay), alignment)


def objective_config(a: argparse.Namespace) -> ObjectiveConfig:
    """The objective with the command line's switches applied."""
    return ObjectiveConfig(
        refine=not (a.no_refinement or a.no_injection),
        align=not (a.no_alignment or a.no_injection),
        replacement=0.0 if a.no_replacement or a.no_injection else ObjectiveConfig.replacement,
    )


def train(a: argparse.Namespace) -> TrainDrafter:
    """Run the training described by the arguments; writes the drafter and ``training_log.json`` to ``a.out``."""
    device = torch.device(a.device)
    target = load_target(a.target, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    corpus = load_corpus(a.corpus)
    drafter = build_drafter(drafter_shape(a, target), target, a.seed)
    objective = Objective(objective_config(a), target.head, compiled=a.compile)
    optimisers = build_optimisers(drafter, a.optimiser, a.lr)
    source = batches(corpus, a.sequences, a.seed, device)
    drafter.tap_scale.copy_(column_scale(target, next(source), drafter.shape.taps))
    log = RunLog(a.steps)
    for step in range(a.steps):
        loss, metrics = block_loss(drafter, target, objective, next(source), a.anchors, step / a.steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        advance(optimisers, learning_rate(step, a.steps, a.warmup))
        log.add(step + 1, loss, metrics)
    drafter.fold()
    size = save_drafter(drafter, target.shape.num_layers, a.out)
    recorded = {name: str(value) if isinstance(value, Path) else value for name, value in vars(a).items()}
    counts = {"sequences": len(corpus), "tokens": len(corpus.tokens), "bytes": size}
    (a.out / "training_log.json").write_text(json.dumps({"arguments": recorded, **counts, "log": log.entries}, indent=1) + "\n")
    return drafter


if __name__ == "__main__":
    train(parse_arguments())
