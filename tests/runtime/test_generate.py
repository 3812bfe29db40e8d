"""The draft-verify loop: exact greedy output, limits, end tokens, statistics."""

from __future__ import annotations

import pytest
import torch

from dspine_export.errors import UsageError
from dspine_export.runtime.generate import generate, generate_batch, generate_plain
from dspine_export.runtime.generation import Settings
from dspine_export.runtime.statistics import AcceptanceStatistics
from tests.runtime.conftest import Opened
from tests.runtime.pairs import BIGRAM_BLOCK, BIGRAM_TOKENS, bigram_successor


def walk(token: int, count: int) -> list[int]:
    successor, tokens = bigram_successor().tolist(), []
    for _ in range(count):
        token = successor[token]
        tokens.append(token)
    return tokens


def test_a_drafter_that_knows_is_always_accepted(bigram: Opened) -> None:
    """One token from the prompt, then full blocks: any slip in anchor, slot or position semantics would cost acceptance."""
    rounds = 5
    result = generate(*bigram, [7, 3], max_new_tokens=1 + rounds * BIGRAM_BLOCK)
    assert result.token_ids == walk(3, 1 + rounds * BIGRAM_BLOCK)
    statistics = result.statistics
    assert statistics.target_calls == statistics.drafts == rounds
    assert statistics.acceptance_length == statistics.mean_acceptance_length == BIGRAM_BLOCK
    assert statistics.acceptance_rate == 1 and statistics.per_position_rates == [1.0] * (BIGRAM_BLOCK - 1)
    assert statistics.target_calls_saved == rounds * (BIGRAM_BLOCK - 1)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 10, 13, 17])
def test_any_length(bigram: Opened, count: int) -> None:
    result = generate(*bigram, [3], max_new_tokens=count)
    assert result.token_ids == walk(3, count) and result.finish_reason == "length"
    assert result.statistics.committed_tokens == count - 1
    assert result.statistics.draft_tokens <= count - 1, "near the limit the block is shortened"


@pytest.mark.parametrize("steps", range(1, 12))
def test_end_token_inside_a_block(bigram: Opened, steps: int) -> None:
    """Tokens accepted behind the end token are discarded."""
    want = walk(3, steps)
    seen: list[int] = []
    result = generate(*bigram, [3], max_new_tokens=40, eos_ids=[want[-1]], on_tokens=seen.extend)
    assert result.token_ids == want == seen and result.finish_reason == "stop"
    assert result.statistics.committed_tokens == steps - 1


def test_prompt_up_to_the_last_position(bigram: Opened) -> None:
    target, executor = bigram
    prompt = [3] * (target.max_positions - 5)
    result = generate(target, executor, prompt, max_new_tokens=100)
    assert result.token_ids == walk(3, 5) and result.finish_reason == "length"
    with pytest.raises(UsageError, match="no room"):
        generate(target, executor, [3] * target.max_positions)
    with pytest.raises(UsageError, match="empty"):
        generate(target, executor, [])
    with pytest.raises(UsageError, match="vocabulary"):
        generate(target, executor, [BIGRAM_TOKENS])


@pytest.mark.parametrize("kind", ["tiny", "dflash"])
def test_greedy_output_is_the_targets_own(kind: str, request: pytest.FixtureRequest) -> None:
    target, executor = request.getfixturevalue(kind)
    for seed in range(6):
        prompt = torch.randint(0, 256, (1 + 5 * seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        want = generate_plain(target, prompt, max_new_tokens=30).token_ids
        assert generate(target, executor, prompt, max_new_tokens=30).token_ids == want


def test_batch_equals_single_sequences(tiny: Opened) -> None:
    """Ragged prompts, sequences that end at different times."""
    target, executor = tiny
    prompts = [[1], [2, 3, 4, 5, 6, 7, 8], [250, 9, 33], [40] * 20]
    alone = [generate(target, executor, prompt, max_new_tokens=20).token_ids for prompt in prompts]
    ends = frozenset({alone[1][4], alone[3][11]})
    settings = Settings(max_new_tokens=20, eos_ids=ends)
    singles = [generate(target, executor, prompt, max_new_tokens=20, eos_ids=ends) for prompt in prompts]
    together = generate_batch(target, executor, prompts, settings)
    assert [r.token_ids for r in together] == [r.token_ids for r in singles]
    assert [r.finish_reason for r in together] == [r.finish_reason for r in singles]
    assert len({len(r.token_ids) for r in together}) > 1


def test_cached_context_is_what_the_whole_text_gives(tiny: Opened) -> None:
    """After generation the drafter's cache equals one built from scratch out of transformers' hidden states (taps 0 and 2)."""
    from transformers import AutoModelForCausalLM

    target, executor = tiny
    kept = {}
    append = executor.append_context

    def spy(state, hidden, counts) -> None:  # type: ignore[no-untyped-def]
        append(state, hidden, counts)
        kept["state"] = state

    executor.append_context = spy  # type: ignore[method-assign]
    try:
        prompt = [5, 77, 140, 12]
        tokens = generate(target, executor, prompt, max_new_tokens=25, eos_ids=[]).token_ids
    finally:
        executor.append_context = append  # type: ignore[method-assign]
    state = kept["state"]
    length = int(state.lengths[0])
    assert len(prompt) < length < len(prompt) + len(tokens)
    model = AutoModelForCausalLM.from_pretrained(target.config._name_or_path)
    with torch.no_grad():
        states = model(torch.tensor([[*prompt, *tokens][:length]]), output_hidden_states=True).hidden_states
    fresh = executor.new_state(1, length)
    executor.append_context(fresh, torch.cat((states[1], states[3]), dim=-1), torch.tensor([length]))
    torch.testing.assert_close(state.keys[:, :, :, :length], fresh.keys[:, :, :, :length], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(state.values[:, :, :, :length], fresh.values[:, :, :, :length], atol=1e-4, rtol=1e-4)


def test_an_executor_with_a_short_cache_stops_drafting(bigram: Opened) -> None:
    target, executor = bigram
    executor.max_context = 20
    try:
        result = generate(target, executor, [3] * 4, max_new_tokens=40)
        long = generate(target, executor, [3] * 30, max_new_tokens=5)
    finally:
        executor.max_context = None
    assert result.token_ids == walk(3, 40) and long.token_ids == walk(3, 5)
    assert 0 < result.statistics.drafts < result.statistics.target_calls and long.statistics.drafts == 0


@pytest.mark.parametrize(
    "setting",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
    ids=str,
)
def test_settings_out_of_range(bigram: Opened, setting: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="Invalid generation setting"):
        generate(*bigram, [3], **setting)  # type: ignore[arg-type]


def test_statistics_in_vllm_terms() -> None:
    statistics = AcceptanceStatistics()
    for drafted, accepted, committed in ((3, 3, 4), (3, 0, 1), (3, 1, 2), (0, 0, 1)):
        statistics.record(drafted, accepted, committed)
    assert (statistics.drafts, statistics.draft_tokens, statistics.accepted_tokens) == (3, 9, 4)
    assert statistics.acceptance_rate == 4 / 9 and statistics.mean_acceptance_length == 1 + 4 / 3
    assert statistics.per_position_rates == [2 / 3, 1 / 3, 1 / 3]
    assert statistics.acceptance_length == 8 / 4 and statistics.target_calls_saved == 4
    both = AcceptanceStatistics()
    both.add(statistics)
    both.add(statistics)
    assert both.accepted_per_position == [4, 2, 2] and both.acceptance_length == statistics.acceptance_length
    assert AcceptanceStatistics().to_json()["acceptance_length"] == 0
