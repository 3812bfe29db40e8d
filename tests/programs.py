"""Traced programs of small drafters in every variant, and their execution beside the eager model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from dspine_export.capture.entries import EntryContract, TensorSpec
from dspine_export.capture.trace import TracedEntry, trace_entries
from dspine_export.checkpoint.config import FULL_ATTENTION, SLIDING_ATTENTION, DrafterConfig
from dspine_export.model.drafter import Drafter
from dspine_export.passes.fold_tables import TOKEN_TABLE
from dspine_export.passes.program import Program
from tests.golden_cases import assert_close, drafter_path, random_context, random_drafter, small_config, write_target

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"block_size": 6},
    "one_candidate": {"top_k": 1},
    "grouped_queries": {"num_heads": 4, "num_kv_heads": 2},
    "sliding_window": {"block_size": 6, "layer_types": (SLIDING_ATTENTION,) * 2, "sliding_window": 4},
    # Every special case of the shapes at once: no slot has a predicted predecessor, no candidate an alternative.
    "smallest": {
        "block_size": 2,
        "top_k": 1,
        "layer_types": (SLIDING_ATTENTION, FULL_ATTENTION),
        "sliding_window": 3,
    },
    "dflash_causal": {"transfer": None},
    "dflash_bidirectional": {"transfer": None, "is_causal": False},
}
DSPINE = tuple(name for name, changes in VARIANTS.items() if "transfer" not in changes)


def variant(name: str) -> DrafterConfig:
    return small_config(**VARIANTS[name])


@functools.cache
def drafter_of(name: str, dtype: torch.dtype = torch.float32) -> Drafter:
    return random_drafter(variant(name), dtype=dtype)


@functools.cache
def traced(name: str, dtype: torch.dtype = torch.float32) -> dict[str, TracedEntry]:
    return trace_entries(variant(name), dtype)


def weights_of(drafter: Drafter) -> dict[str, Tensor]:
    """The tensors a program may name: the model's, and the folded table."""
    weights = dict(drafter.model.state_dict())
    injection, codes = drafter.model.injection, drafter.model.transfer_codes
    if injection is not None and codes is not None:
        feature = injection.known_feature(codes)
        weights[TOKEN_TABLE] = torch.cat((injection.message(feature), injection.predecessor_gate(feature)), dim=-1)
    return weights


def draft_case(drafter: Drafter, lengths: list[int], capacity: int, seed: int = 1) -> tuple[dict[str, Tensor], Any]:
    """Inputs of the draft entry, and what the eager model makes of them; odd sequences are sampled."""
    anchors, hidden, counts = random_context(drafter, lengths, seed)
    state = drafter.new_state(len(lengths), capacity)
    drafter.append_context(state, hidden, counts)
    inputs = {
        "anchor_ids": anchors,
        "context_lengths": counts,
        "keys": state.keys,
        "values": state.values,
        "embed_tokens": drafter.embed_tokens,
        "lm_head": drafter.lm_head,
    }
    if drafter.config.transfer is None:
        return inputs, drafter.draft_from(state, anchors)
    heat = torch.arange(len(lengths)).remainder(2).float()
    uniforms = torch.rand(len(lengths), drafter.config.block_size - 1, generator=torch.Generator().manual_seed(seed))
    inputs |= {"temperature": heat, "uniforms": uniforms}
    return inputs, drafter.draft_from(state, anchors, heat, uniforms=uniforms)


def assert_drafts_like_eager(program: Program, drafter: Drafter, lengths: list[int], capacity: int) -> None:
    inputs, want = draft_case(drafter, lengths, capacity)
    with torch.no_grad():
        got = program.run(weights_of(drafter), inputs)
    assert list(got) == [spec.name for spec in program.contract.outputs]
    for name in ("tokens", "unrefined_tokens", "candidate_ids"):
        if name in got:
            assert torch.equal(got[name], getattr(want, name)), name
    for name in ("transition_scores", "q"):
        if name in got:
            assert_close(got[name], getattr(want, name))


def fingerprint(program: Program) -> list[tuple[str, str, str]]:
    """The graph up to node names: operators, and arguments by position."""
    place = {node: index for index, node in enumerate(program.graph.nodes)}

    def described(node: fx.Node) -> str:
        return str(fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}"))

    return [(node.op, str(node.target) if node.op == "call_function" else "", described(node)) for node in place]


def count(program: Program, target: Any) -> int:
    return sum(node.target == target for node in program.graph.nodes)


def synthetic(function: Callable[..., Any], *examples: Tensor, dtype: torch.dtype = torch.float32) -> Program:
    """A program of an arbitrary function of plain tensors, with a contract of its own."""

    class Module(torch.nn.Module):
        def forward(self, *operands: Tensor) -> Any:
            return function(*operands)

    exported = torch.export.export(Module(), examples, strict=False)
    graph = fx.Graph()
    graph.output(graph.graph_copy(exported.graph, {}))
    names = [node.name for node in graph.nodes if node.op == "placeholder"]

    def spec(name: str, value: Tensor) -> TensorSpec:
        return TensorSpec(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))

    inputs = tuple(spec(name, value) for name, value in zip(names, examples, strict=True))
    results = graph.output_node().args[0]
    outputs = tuple(spec(f"out{i}", node.meta["val"]) for i, node in enumerate(results))  # type: ignore[union-attr, arg-type]
    entry = TracedEntry(exported, EntryContract("synthetic", inputs, outputs), variant("plain"), dtype)
    return Program(graph, {}, entry)


def write_variant(name: str, folder: Path) -> tuple[Path, Path]:
    """A variant's random weights as a checkpoint and a target on disk, float32."""
    config, drafter = variant(name), drafter_of(name)
    raw = json.loads((drafter_path("b4_mha_k1") / "config.json").read_text())
    raw |= {
        "architectures": ["DSpineDraftModel" if config.transfer else "DFlashDraftModel"],
        "is_causal": config.is_causal,
        "block_size": config.block_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
    }
    tensors = {key: value.contiguous() for key, value in drafter.model.state_dict().items()}
    if config.transfer is None:
        del raw["dspine_config"]
    else:
        raw["dspine_config"] |= {"top_k": config.transfer.top_k}
        tensors["transfer_ready"] = torch.tensor(True)
    (folder / "drafter").mkdir(parents=True)
    (folder / "drafter" / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "drafter" / "model.safetensors")
    matrices = {"model.embed_tokens.weight": drafter.embed_tokens, "lm_head.weight": drafter.lm_head}
    write_target("b4_mha_k1", folder / "target")
    save_file(matrices, folder / "target" / "model.safetensors")
    return folder / "drafter", folder / "target"
