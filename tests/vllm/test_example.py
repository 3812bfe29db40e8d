"""The example pair in real vLLM: a trained drafter, real text, greedy output token for token the target's own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM; make test-vllm installs it")

from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.checkpoint.target import read_target
from dspine_export.example import materialise_example_target
from dspine_export.vllm.files import write_files
from tests.vllm.engines import counter, engine, generate
from tools.training.prompts import encode_prompts, load_tokenizer, read_prompts

ROOT = Path(__file__).parents[2]
TOKENS = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialise_example_target(tmp_path_factory.mktemp("example") / "target")


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``build --target vllm`` writes: codes recomputed and folded."""
    bundle = tmp_path_factory.mktemp("bundle")
    return write_files(
        bundle, open_checkpoint(ROOT / "recipes/example/drafter"), read_target(target), "float32", str(target)
    )


def test_greedy_output_equals_the_targets_own(target: Path, drafter: Path) -> None:
    """20 prompts over four slots, prefill in chunks of 64, with a cold and a warm prefix cache; most drafts are accepted."""
    tokenizer = load_tokenizer(target)
    files = sorted((ROOT / "tests/data/prompts").glob("*.jsonl"))
    rows = [row for path in files for row in read_prompts(path)]
    prompts = [ids for ids in encode_prompts(tokenizer, rows) if len(ids) < 90][:20]
    assert len(prompts) == 20
    with engine(target) as llm:
        alone = generate(llm, prompts, TOKENS)
    with engine(
        target, drafter, max_num_batched_tokens=128, long_prefill_token_threshold=64, enable_prefix_caching=True
    ) as llm:
        assert generate(llm, prompts, TOKENS) == alone
        accepted, drafts = counter(llm, "spec_decode_num_accepted_tokens"), counter(llm, "spec_decode_num_drafts")
        hits = counter(llm, "prefix_cache_hits")
        assert generate(llm, prompts[:6], TOKENS) == alone[:6]
        assert counter(llm, "prefix_cache_hits") > hits
    assert accepted / drafts > 1.5
