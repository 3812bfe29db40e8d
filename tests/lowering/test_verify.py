"""Verification passes on what was exported, and catches one planted fault at a time by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch

from dspine_export.checkpoint.safetensors_header import read_header
from dspine_export.errors import BuildError, VerificationError
from dspine_export.lowering import VerificationReport, require_passed, verify_onnx
from dspine_export.lowering.onnx_session import OnnxSession
from dspine_export.lowering.verify import _is_near_tie
from dspine_export.model.output import DraftOutput
from tests.golden_cases import assert_close, golden_drafter, golden_io
from tests.lowering.conftest import Exported, export_pair
from tests.programs import write_variant

Copy = Callable[[Exported], Exported]
GRAPHS = ("context.onnx", "draft.onnx", "draft.fused.onnx")


def test_passes(exported: Exported) -> None:
    messages: list[str] = []
    report = verify_onnx(exported.checkpoint, exported.target, exported.folder / "portable", progress=messages.append)
    require_passed(report)
    assert report.passed and report.first_difference is None and report.near_ties == 0
    assert report.graphs == dict.fromkeys(GRAPHS, 5)
    assert report.tokens == 2 * 7 * (1 + 1 + 2 + 3 + 5)
    assert set(report.largest_error) == {"new_keys", "new_values", "transition_scores", "q"}
    assert all(error < 1e-4 for error in report.largest_error.values())
    assert len(messages) == 3


def test_golden_inputs_through_onnx_runtime(exported: Exported) -> None:
    """Not only states that verification makes up: the reference's own case, context entry included."""
    io, drafter = golden_io("b8_gqa"), golden_drafter("b8_gqa")
    n = len(io["anchor_ids"])
    context = OnnxSession(exported.folder / "portable" / "context.onnx")
    start = torch.zeros(n, dtype=torch.int64)
    cache = context.run({"target_hidden": io["target_hidden"], "start_positions": start})
    feeds = {
        "anchor_ids": io["anchor_ids"],
        "context_lengths": io["context_lengths"],
        "keys": cache["new_keys"],
        "values": cache["new_values"],
        "temperature": torch.zeros(n),
        "uniforms": torch.zeros(n, 7),
        "embed_tokens": drafter.embed_tokens,
        "lm_head": drafter.lm_head,
    }
    for graph in ("draft.onnx", "draft.fused.onnx"):
        out = OnnxSession(exported.folder / "portable" / graph).run(feeds)
        assert torch.equal(out["tokens"], io["draft_tokens"])
        assert torch.equal(out["candidate_ids"], io["candidate_ids"])
        assert torch.equal(out["unrefined_tokens"], io["unrefined_tokens"])
        assert_close(out["transition_scores"], io["transition_scores"])


def edit_weight(folder: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    path = folder / "weights.safetensors"
    info, data = read_header(path)[name], bytearray(path.read_bytes())
    span = slice(info.offset_bytes, info.offset_bytes + info.size_bytes)
    tensor = torch.frombuffer(bytearray(data[span]), dtype=torch.float32)
    data[span] = edit(tensor).contiguous().numpy().tobytes()
    path.write_bytes(data)


def edit_model(path: Path, edit: Callable[[onnx.ModelProto], None]) -> None:
    model = onnx.load(str(path), load_external_data=False)
    edit(model)
    onnx.save(model, str(path))


def one_element(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[tensor.numel() // 2] += 0.5
    return tensor


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("fc.weight", r"^context\.onnx: new_(keys|values)"),
        ("layers.2.self_attn.v_proj.weight", r"^context\.onnx: new_values"),
        ("layers.1.mlp.down_proj.weight", r"^draft\.onnx: (candidate_ids|tokens|transition_scores)"),
        ("injection.bias", r"^draft\.onnx: (candidate_ids|tokens|transition_scores)"),
        ("norm.weight", r"^draft\.onnx: (candidate_ids|tokens|transition_scores)"),
        ("token_table", r"^draft\.fused\.onnx: "),
    ],
)
def test_one_changed_weight(exported: Exported, copy_of: Copy, weight: str, expected: str) -> None:
    damaged = copy_of(exported)
    edit = (lambda t: 1.05 * t) if weight == "token_table" else one_element
    edit_weight(damaged.folder / "portable", weight, edit)
    assert_caught(damaged.verify(), expected)


def assert_caught(report: VerificationReport, expected: str) -> None:
    assert report.first_difference is not None and re.search(expected, report.first_difference)
    with pytest.raises(VerificationError) as caught:
        require_passed(report)
    assert report.first_difference in str(caught.value) and caught.value.exit_code == 6


@pytest.mark.parametrize("graph", ["draft.onnx", "draft.fused.onnx"])
def test_two_swapped_weights(exported: Exported, copy_of: Copy, graph: str) -> None:
    """Equal shapes, so that nothing but the values can tell."""

    def swap(model: onnx.ModelProto) -> None:
        named = {tensor.name: tensor for tensor in model.graph.initializer}
        a, b = (named[f"injection.{kind}.weight"] for kind in ("message", "receiver_gate"))
        places = [list(t.external_data) for t in (a, b)]
        copies = [[onnx.StringStringEntryProto(key=e.key, value=e.value) for e in place] for place in places]
        for tensor, entries in ((a, copies[1]), (b, copies[0])):
            del tensor.external_data[:]
            tensor.external_data.extend(entries)

    damaged = copy_of(exported)
    edit_model(damaged.folder / "portable" / graph, swap)
    assert_caught(damaged.verify(), rf"^{re.escape(graph)}: ")


def test_changed_attribute_of_our_operator(exported: Exported, copy_of: Copy) -> None:
    """The function body reads eps from the node, so what TensorRT's plugin would read is what is verified."""

    def change(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.op_type == "TransitionScores")
        next(a for a in node.attribute if a.name == "eps").f = 0.05

    damaged = copy_of(exported)
    edit_model(damaged.folder / "portable" / "draft.fused.onnx", change)
    assert_caught(damaged.verify(), r"^draft\.fused\.onnx: (tokens|transition_scores)")


def test_changed_norm(exported: Exported, copy_of: Copy) -> None:
    def change(model: onnx.ModelProto) -> None:
        node = [n for n in model.graph.node if n.op_type == "RMSNormalization"][1]
        next(a for a in node.attribute if a.name == "epsilon").f = 0.3

    damaged = copy_of(exported)
    edit_model(damaged.folder / "portable" / "draft.onnx", change)
    assert_caught(damaged.verify(), r"^draft\.onnx: ")


def test_ignored_start_positions(exported: Exported, copy_of: Copy) -> None:
    """A context graph that always starts at position 0 is right only for the first append."""

    def change(model: onnx.ModelProto) -> None:
        zero = onnx.helper.make_node("Sub", ["start_positions", "start_positions"], ["start_zero"])
        for node in model.graph.node:
            for index, name in enumerate(node.input):
                if name == "start_positions":
                    node.input[index] = "start_zero"
        model.graph.node.insert(0, zero)

    damaged = copy_of(exported)
    edit_model(damaged.folder / "portable" / "context.onnx", change)
    assert_caught(damaged.verify(), r"^context\.onnx: new_keys")


def test_nan_is_a_difference(exported: Exported, copy_of: Copy) -> None:
    damaged = copy_of(exported)
    edit_weight(damaged.folder / "portable", "hidden_norm.weight", lambda t: torch.full_like(t, float("nan")))
    assert_caught(damaged.verify(), r"^context\.onnx: new_")


@pytest.mark.parametrize("fault", ["truncated", "missing"])
def test_damaged_weights_file(exported: Exported, copy_of: Copy, fault: str) -> None:
    damaged = copy_of(exported)
    path = damaged.folder / "portable" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-4096]) if fault == "truncated" else path.unlink()
    with pytest.raises(BuildError, match="ONNX Runtime cannot load the graph"):
        damaged.verify()


def test_missing_graph(exported: Exported, copy_of: Copy) -> None:
    damaged = copy_of(exported)
    (damaged.folder / "portable" / "draft.fused.onnx").unlink()
    with pytest.raises(BuildError, match=r"draft\.fused\.onnx"):
        damaged.verify()


def test_nothing_compared_is_not_a_pass() -> None:
    with pytest.raises(VerificationError, match="no graph was compared"):
        require_passed(VerificationReport())


def test_special_shapes(smallest: Exported) -> None:
    report = verify_onnx(smallest.checkpoint, smallest.target, smallest.folder / "portable")
    require_passed(report)
    config = smallest.checkpoint.config
    assert (config.block_size, config.attention_window(0), config.attention_window(1)) == (2, 3, None)
    assert report.graphs == dict.fromkeys(GRAPHS, 5)


def test_dflash(tmp_path: Path) -> None:
    """A drafter without transition, from disk to verified graphs."""
    built = export_pair(*write_variant("dflash_bidirectional", tmp_path), tmp_path, "float32")
    report = verify_onnx(built.checkpoint, built.target, tmp_path / "portable")
    require_passed(report)
    assert report.graphs == dict.fromkeys(GRAPHS, 5) and "transition_scores" not in report.largest_error
    assert not built.checkpoint.config.is_causal


# --- near-ties: what may differ, and what may not


def lattice(heat: float, scores: list[list[float]]) -> tuple[DraftOutput, tuple[torch.Tensor, torch.Tensor]]:
    """One sequence of two slots and three candidates; every predecessor has the slot's row."""
    from dspine_export.model.transition import walk

    table = torch.tensor(scores)[None, :, None, :].expand(1, 2, 3, 3).contiguous()
    ids = torch.tensor([[[10, 11, 12], [20, 21, 22]]])
    draws = torch.tensor([heat]), torch.full((1, 2), 0.4)
    tokens, q = walk(table, ids, *draws)
    return DraftOutput(tokens, ids[..., 0], ids, table, q), draws


def test_near_tie_of_a_greedy_walk() -> None:
    want, draws = lattice(0.0, [[1.0, 1.0 - 5e-5, 0.0], [0.0, 2.0, 1.0]])
    assert want.tokens.tolist() == [[10, 21]]
    assert _is_near_tie(want, torch.tensor([[11, 21]]), draws, 0)
    assert _is_near_tie(want, torch.tensor([[11, 20]]), draws, 0)  # what follows is a consequence
    assert not _is_near_tie(want, torch.tensor([[12, 21]]), draws, 0)
    assert not _is_near_tie(want, torch.tensor([[10, 22]]), draws, 0)  # the near-tie elsewhere excuses nothing
    assert not _is_near_tie(want, torch.tensor([[99, 21]]), draws, 0)  # not even a candidate


def test_near_tie_of_a_sampled_walk() -> None:
    first = float(torch.tensor(0.4 / 0.6).log())  # softmax (0.4, 0.6, 0): the draw 0.4 lies on the border
    want, draws = lattice(1.0, [[first, 0.0, -50.0], [3.0, 0.0, 0.0]])
    other = {10: 11, 11: 10}[int(want.tokens[0, 0])]
    assert _is_near_tie(want, torch.tensor([[other, int(want.tokens[0, 1])]]), draws, 0)
    assert not _is_near_tie(want, torch.tensor([[int(want.tokens[0, 0]), 22]]), draws, 0)


def test_one_candidate_leaves_nothing_to_excuse() -> None:
    ids = torch.tensor([[[10], [20]]])
    want = DraftOutput(ids[..., 0], ids[..., 0], ids, torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1))
    assert not _is_near_tie(want, torch.tensor([[10, 99]]), (torch.zeros(1), torch.zeros(1, 2)), 0)
