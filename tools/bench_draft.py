"""The cost of a draft pass on a GPU: floor, eager model in a CUDA graph, our kernels in a CUDA graph; DFlash and DSpine.

    python -m tools.bench_draft --batches 1 8 32 --contexts 2000 --out tools/results/bench_draft.json

Random weights at Qwen3-8B shapes, bfloat16. Floor of a batch = max(weight bytes / measured bandwidth,
FLOP / measured GEMM rate) + K/V bytes / bandwidth. The tokens of every timed kernel pass are
compared with the eager model's on the same state.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dspine_export.checkpoint.config import DrafterConfig, TransferConfig
from dspine_export.model.drafter import Drafter
from dspine_export.model.drafter_model import DrafterModel
from dspine_export.runtime.kernel_pass import CacheView, ContextPass, DraftPass
from dspine_export.runtime.packed_weights import PackedDrafter, pack
from tools.gpu_timing import capture, copy_bandwidth_gb_s, gemm_tflop_s, replay_us

QWEN3_8B = DrafterConfig(
    layout="specforge", architecture="DSpineDraftModel", hidden_size=4096, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=128,
    intermediate_size=12288, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960, block_size=16,
    mask_token_id=151669, target_layer_ids=(1, 9, 17, 25, 33), num_target_layers=36, is_causal=True, layer_types=("full_attention",) * 5,
    sliding_window=None, dtype="bfloat16", transfer=TransferConfig(rank=1024, message_size=512, top_k=16),
)  # fmt: skip


def random_drafter(config: DrafterConfig) -> Drafter:
    """A drafter with weights scaled so that activations stay in range, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.device("meta"):
        model = DrafterModel(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.fill_(1.0)
        elif name == "transfer_codes":
            tensor.normal_(generator=generator)
            tensor.div_(tensor.float().norm(dim=-1, keepdim=True))
        else:
            tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
    table = [torch.empty(config.vocab_size, config.hidden_size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    for tensor in table:
        tensor.normal_(std=0.03, generator=generator)
    return Drafter(model.eval().requires_grad_(False), *table)


def floor_us(config: DrafterConfig, batch: int, context: int, copy_gb_s: float, gemm: float) -> dict[str, float]:
    """What no implementation can beat, microseconds, with its parts."""
    d, f = config.hidden_size, config.intermediate_size
    attention = config.head_dim * d * (2 * config.num_heads + 2 * config.num_kv_heads)
    weights = config.num_layers * (attention + 3 * d * f) + config.vocab_size * d
    if config.transfer is not None:
        r, m = config.transfer.rank, config.transfer.message_size
        weights += config.num_layers * (d * r + d * m) + 3 * m * r
    kv = 2 * 2 * batch * context * config.num_layers * config.num_kv_heads * config.head_dim
    read, compute = weights * 2 / copy_gb_s / 1e3, 2 * weights * batch * config.block_size / gemm / 1e6
    return {
        "weights": read,
        "flop": compute,
        "kv": kv / copy_gb_s / 1e3,
        "total": max(read, compute) + kv / copy_gb_s / 1e3,
    }


def measure(drafter: Drafter, weights: PackedDrafter, batch: int, context: int) -> dict[str, Any]:
    """Eager and kernel passes on one random state; microseconds, and the share of equal tokens."""
    config = drafter.config
    state = drafter.new_state(batch, context + 64)
    state.keys.normal_()
    state.values.normal_()
    state.lengths.fill_(context)
    anchors = torch.randint(0, config.vocab_size - 1000, (batch,), device="cuda")
    cache = CacheView(state.keys, state.values, state.lengths)
    ours = DraftPass(config, weights, cache)
    ours.anchor_ids.copy_(anchors)
    graph = capture(ours.launch)
    graph.replay()
    result: dict[str, Any] = {"kernels": replay_us(graph)}
    model, zeros = drafter.model, torch.zeros(batch, config.block_size - 1, device="cuda")
    heat = torch.zeros(batch, device="cuda")

    def eager() -> object:
        states = model.block_states(anchors, state.keys, state.values, state.lengths, drafter.embed_tokens)
        logits = states.hidden[:, 1:] @ drafter.lm_head.T
        ids = torch.topk(logits, config.transfer.top_k if config.transfer else 1, dim=-1).indices
        if config.transfer is None:
            return ids
        scores = model.transition_scores(states, anchors, ids, drafter.lm_head)
        from dspine_export.model.transition import walk

        return walk(scores, ids, heat, zeros)

    with torch.no_grad():
        result["eager_graph"] = replay_us(capture(eager), 7, 3)
        expected = drafter.draft_from(state, anchors)
    result["equal_tokens"] = float((expected.tokens == ours.tokens).float().mean())
    result["stages"] = {
        stage: result["kernels"] - replay_us(capture(without(ours, stage)), 7)
        for stage in dict.fromkeys(s.stage for s in ours.steps)
    }
    append = ContextPass(config, weights, CacheView(state.keys, state.values, torch.zeros_like(state.lengths)), 16)
    result["append_16"] = replay_us(capture(append.launch))
    return result


def without(draft: DraftPass, stage: str) -> Callable[[], None]:
    """The pass less one stage: its cost by subtraction."""
    steps = [step for step in draft.steps if step.stage != stage]

    def run() -> None:
        for step in steps:
            step.run()

    return run


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2000])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    report: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    }
    report["copy_gb_s"], report["gemm_tflop_s"] = copy, gemm = copy_bandwidth_gb_s(), gemm_tflop_s()
    print(f"copy {copy:.0f} GB/s, GEMM {gemm:.0f} TFLOP/s", flush=True)
    rows = []
    for kind in ("DFlash", "DSpine"):
        config = QWEN3_8B if kind == "DSpine" else dataclasses.replace(QWEN3_8B, transfer=None)
        drafter = random_drafter(config)
        weights = pack(drafter, max(arguments.contexts) + 128)
        for context in arguments.contexts:
            for batch in arguments.batches:
                floor = floor_us(config, batch, context, copy, gemm)
                row = {
                    "kind": kind,
                    "batch": batch,
                    "context": context,
                    "floor": floor,
                    **measure(drafter, weights, batch, context),
                }
                rows.append(row)
                print(
                    f"{kind} batch {batch} context {context}: floor {floor['total']:.0f} us, kernels {row['kernels']:.0f} "
                    f"({row['kernels'] / floor['total']:.2f}x), eager graph {row['eager_graph']:.0f}, "
                    f"append {row['append_16']:.0f}, equal tokens {row['equal_tokens']:.3f}",
                    flush=True,
                )
                print("   ", {stage: round(us, 1) for stage, us in row["stages"].items()}, flush=True)
        del drafter, weights
        torch.cuda.empty_cache()
    report["rows"] = rows
    arguments.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
