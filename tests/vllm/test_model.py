"""The drafter inside real vLLM: lossless in every mode of serving, and its drafts are the torch model's.

One engine costs seconds to minutes, so few engines carry many assertions.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("vllm", reason="needs vLLM; make test-vllm installs it")

from dspine_export import load_checkpoint
from tests.runtime.pairs import Pair, bigram_successor
from tests.vllm.engines import ON_GPU, counter, engine, generate
from tests.vllm.pairs import write_certain_pair, write_noisy_pair
from tools.vllm_engine import model_runner
from tools.vllm_rounds import Agreement, Recorder, compare_rounds

TOKENS, SAMPLED = 16, 60
SLOTS = 4


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return write_noisy_pair(tmp_path_factory.mktemp("noisy"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """20 prompts of 3 to 150 tokens; half share a long beginning, for the prefix cache."""
    source = random.Random(4)
    shared = [source.randrange(48) for _ in range(70)]
    lengths = [3 + 8 * index for index in range(20)]
    own = [[source.randrange(48) for _ in range(length)] for length in lengths]
    return [shared + prompt[:20] if index % 2 else prompt for index, prompt in enumerate(own)]


@pytest.fixture(scope="module")
def alone(noisy: Pair, prompts: list[list[int]]) -> list[list[int]]:
    """What the target generates greedily without speculation."""
    with engine(noisy.target) as llm:
        return generate(llm, prompts, TOKENS)


def agreement(pair: Pair, recorder: Recorder) -> Agreement:
    """The recorded rounds against the torch model."""
    weights = load_file(pair.target / "model.safetensors")
    embed, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    device = "cuda" if ON_GPU else "cpu"
    drafter = load_checkpoint(pair.drafter).bind(embed_tokens=embed.to(device), lm_head=head.to(device))
    return compare_rounds(drafter, recorder)


def test_a_drafter_that_knows_the_target_is_never_rejected(tmp_path: Path) -> None:
    """Compiled, six requests over four slots."""
    pair = write_certain_pair(tmp_path)
    successor = bigram_successor().tolist()
    with engine(pair.target, pair.drafter, enforce_eager=False) as llm:
        outputs = generate(llm, [[index] for index in range(6)], 40)
        drafted, accepted = (counter(llm, f"spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    for first, output in enumerate(outputs):
        expected = [successor[first]]
        while len(expected) < 40:
            expected.append(successor[expected[-1]])
        assert output == expected
    assert drafted > 0
    assert accepted == drafted


def test_greedy_output_and_drafts(noisy: Pair, prompts: list[list[int]], alone: list[list[int]]) -> None:
    """Without prefix cache: 20 prompts over four slots, short blocks, too little cache for all (preemption), the model length's end."""
    blocks = {"num_gpu_blocks_override": 26 if ON_GPU else 14}
    with engine(noisy.target, noisy.drafter, drafted=5, enable_prefix_caching=False, **blocks) as llm:
        recorder = Recorder(limit=80)
        recorder.attach(model_runner(llm).speculator)
        assert generate(llm, prompts, TOKENS) == alone
        accepted, drafts = counter(llm, "spec_decode_num_accepted_tokens"), counter(llm, "spec_decode_num_drafts")
        long = (prompts[0] * 90)[:240]
        to_the_end = generate(llm, [long], 16)
        preempted = counter(llm, "num_preemptions")
    assert 0.5 < accepted / drafts < 4.5, "rejections and acceptances both occur"
    assert preempted > 0
    assert len(to_the_end[0]) == 16
    found = agreement(noisy, recorder)
    assert found.rounds >= 40
    # On a GPU vLLM's attention multiplies float32 as TF32: a tie may go the other way.
    assert found.equal == found.tokens or (ON_GPU and found.share > 0.99 and max(found.margins) < 0.01), found.as_dict()


def test_prefix_cache_chunked_prefill_and_sampling(
    noisy: Pair, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """With prefix cache, prefill in chunks of 64, probabilistic drafts: greedy requests are lossless, sampled ones follow the target."""
    options = {
        "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 64,
        "speculative": {"draft_sample_method": "probabilistic"},
    }
    with engine(noisy.target, noisy.drafter, enable_prefix_caching=True, **options) as llm:
        assert generate(llm, prompts, TOKENS) == alone
        hits = counter(llm, "prefix_cache_hits")
        again = generate(llm, prompts[:6], TOKENS)
        assert again == alone[:6], "every prompt's context now comes from the prefix cache"
        assert counter(llm, "prefix_cache_hits") > hits
        accepted = counter(llm, "spec_decode_num_accepted_tokens")
        seeds = list(range(40, 52))
        starts = [prompts[index][:6] for index in range(12)]
        sampled = generate(llm, starts, SAMPLED, temperature=1.0, seed=seeds)
        accepted = counter(llm, "spec_decode_num_accepted_tokens") - accepted
        alone_again = generate(llm, starts[3:4], 30, temperature=1.0, seed=seeds[3])
    assert accepted > 100
    assert alone_again[0] == sampled[3][:30], "a request's seed alone decides its tokens"
    check_distribution(noisy.target, starts, sampled)


def check_distribution(target: Path, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Given its prefix, every token must be a draw from the target's distribution at temperature 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    expected, variance, observed, surprise, spread = 0.0, 0.0, 0.0, 0.0, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].double()
        log_p = logits.log_softmax(-1)
        p, tokens = log_p.exp(), torch.tensor(output)
        observed = observed + torch.nn.functional.one_hot(tokens, p.shape[1]).double().sum(0)
        expected, variance = expected + p.sum(0), variance + (p * (1 - p)).sum(0)
        mean = (p * log_p).sum(-1)
        surprise += float((log_p.gather(-1, tokens[:, None])[:, 0] - mean).sum())
        spread += float(((p * log_p.square()).sum(-1) - mean.square()).sum())
    z = (observed - expected) / variance.sqrt()
    # Sums of martingale differences: standard normal each, so the squares add up to about V of them, and 1e-6 is beyond five sigma.
    assert float(z.square().sum()) < len(z) + 6 * (2 * len(z)) ** 0.5, z
    assert abs(surprise) < 4.5 * spread**0.5, "tokens are likelier or less likely than the target's own samples"
