"""Tensor parallelism: a sharded target and head, replicated injection; lossless, and drafting as on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM; make test-vllm installs it")

from tests.vllm.engines import counter, engine, generate
from tests.vllm.pairs import write_noisy_pair

PROMPTS = [[5 * index % 48, 7, 3 + index, 11, *range(index)] for index in range(20)]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_draft_as_one_does(tmp_path: Path) -> None:
    pair = write_noisy_pair(tmp_path, top_k=12)  # each rank holds 16 of 48 rows, or 32
    with engine(pair.target) as llm:
        alone = generate(llm, PROMPTS, 32)
    accepted = []
    for size in (1, 2):
        with engine(pair.target, pair.drafter, tensor_parallel_size=size) as llm:
            assert generate(llm, PROMPTS, 32) == alone
            accepted.append(counter(llm, "spec_decode_num_accepted_tokens"))
    assert accepted[0] > 50
    assert accepted[1] == pytest.approx(accepted[0], rel=0.02)
