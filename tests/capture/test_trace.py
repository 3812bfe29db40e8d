"""The traced entry points: their contract, and their agreement with the eager model at sizes they were not traced with."""

from __future__ import annotations

import pytest
import torch

from dspine_export.capture import trace
from dspine_export.capture.entries import context_contract, draft_contract
from dspine_export.capture.trace import EXAMPLE_SIZES, trace_entries
from dspine_export.errors import BuildError
from dspine_export.passes.program import from_traced
from tests.golden_cases import assert_close, random_context
from tests.programs import VARIANTS, assert_drafts_like_eager, drafter_of, traced, variant, weights_of


def test_contract_of_a_dspine_drafter() -> None:
    config = variant("plain")
    inputs = {spec.name: spec for spec in draft_contract(config).inputs}
    assert set(inputs) == {
        *("anchor_ids", "context_lengths", "keys", "values"),
        *("temperature", "uniforms", "embed_tokens", "lm_head"),
    }
    assert inputs["keys"].shape == ("batch", config.num_layers, config.num_kv_heads, "context", config.head_dim)
    assert (inputs["temperature"].dtype, inputs["anchor_ids"].dtype, inputs["keys"].dtype) == ("float32", "int64", "T")
    names = [spec.name for spec in draft_contract(config).outputs]
    assert names == ["tokens", "candidate_ids", "transition_scores", "q", "unrefined_tokens"]
    assert [spec.name for spec in context_contract(config).inputs] == ["target_hidden", "start_positions"]


def test_contract_of_a_dflash_drafter() -> None:
    contract = draft_contract(variant("dflash_causal"))
    assert {spec.name for spec in contract.inputs}.isdisjoint({"temperature", "uniforms"})
    assert [spec.name for spec in contract.outputs] == ["tokens", "unrefined_tokens"]


@pytest.mark.parametrize("name", VARIANTS)
def test_traced_placeholders_and_outputs(name: str) -> None:
    for entry, one in traced(name).items():
        program = from_traced(one)
        inputs = [node for node in program.placeholders() if node.name not in program.weights]
        assert [node.name for node in inputs] == [spec.name for spec in one.contract.inputs]
        for node, spec in zip(inputs, one.contract.inputs, strict=True):
            value = node.meta["val"]
            assert [isinstance(size, torch.SymInt) for size in value.shape] == [isinstance(d, str) for d in spec.shape]
            assert value.dtype == (torch.float32 if spec.dtype == "T" else getattr(torch, spec.dtype))
        assert len(program.output_nodes()) >= len(one.contract.outputs), entry


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("lengths", "capacity"), [([0], 1), ([3, 0, 7, 2], 9)], ids=["smallest", "ragged"])
def test_draft_like_eager(name: str, lengths: list[int], capacity: int) -> None:
    assert len(lengths) != EXAMPLE_SIZES["batch"] and capacity != EXAMPLE_SIZES["context"]
    assert_drafts_like_eager(from_traced(traced(name)["draft"]), drafter_of(name), lengths, capacity)


@pytest.mark.parametrize("name", ["plain", "grouped_queries", "dflash_causal"])
def test_context_like_eager(name: str) -> None:
    drafter, program = drafter_of(name), from_traced(traced(name)["context"])
    for lengths in ([1], [4, 2]):
        _, hidden, _ = random_context(drafter, lengths)
        start = torch.arange(len(lengths)) * 700
        inputs = {"target_hidden": hidden, "start_positions": start}
        with torch.no_grad():
            got = program.run(weights_of(drafter), inputs)
        want = drafter.model.context_keys_values(hidden, start[:, None] + torch.arange(hidden.shape[1]))
        assert_close(got["new_keys"], want[0])
        assert_close(got["new_values"], want[1])


def test_weights_stay_fakes() -> None:
    """Tracing a model of any size allocates none of its weights."""
    program = traced("plain")["draft"].program
    assert program.state_dict
    assert all(isinstance(v, torch._subclasses.FakeTensor) for v in program.state_dict.values())


def test_bfloat16_keeps_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    entries = trace_entries(variant("dflash_causal"), torch.bfloat16)
    assert torch.get_default_dtype() == before
    values = {v.dtype for v in entries["draft"].program.state_dict.values()}
    assert values == {torch.bfloat16}


def test_a_failing_trace_is_a_build_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()

        def forward(self, target_hidden: torch.Tensor, start_positions: torch.Tensor) -> torch.Tensor:
            raise ValueError("no such layer")

    monkeypatch.setattr(trace, "ContextEntry", Broken)
    before = torch.get_default_dtype()
    with pytest.raises(BuildError, match="no such layer") as caught:
        trace_entries(variant("plain"), torch.float32)
    assert "context entry" in str(caught.value) and torch.get_default_dtype() == before
