"""The whole draft step is captured in a CUDA graph, as TensorRT-LLM does, and replayed on other anchors and contexts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dspine_export.checkpoint.load import open_checkpoint
from dspine_export.model.loading import LoadedCheckpoint
from dspine_export.trtllm.block_executors import BlockExecutor, TorchBlock
from dspine_export.trtllm.draft_model import DSpineForCausalLM

from .conftest import GOLDEN, Tables

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_export.trtllm.kernel_block import open_kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
BATCH, COLUMNS, SLOTS = 3, 64, 5


@pytest.fixture(params=["torch", "kernels"])
def draft(tables: Tables, request: pytest.FixtureRequest) -> DSpineForCausalLM:
    checkpoint = open_checkpoint(GOLDEN / "drafter")

    def load(embed: torch.Tensor, head: torch.Tensor) -> tuple[object, BlockExecutor]:
        drafter = LoadedCheckpoint(checkpoint).bind(embed_tokens=embed, lm_head=head, check_codes=False)
        return open_kernels(drafter) if request.param == "kernels" else (drafter.model, TorchBlock(drafter))

    model = DSpineForCausalLM(checkpoint.config, SimpleNamespace(pretrained_config=None), "VANILLA", load)  # type: ignore[arg-type]
    embedding = torch.nn.Embedding.from_pretrained(tables.embed_tokens.cuda())
    head = torch.nn.Linear(tables.lm_head.shape[1], tables.lm_head.shape[0], bias=False, device="cuda")
    head.weight = torch.nn.Parameter(tables.lm_head.cuda(), requires_grad=False)
    model.logits_processor = lambda hidden, own, attention, context: own(hidden).float()
    model.load_weights_from_target_model(SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding), lm_head=head))
    return model


def test_replay_equals_eager(draft: DSpineForCausalLM) -> None:
    config = draft.drafter_config
    noise = torch.Generator("cuda").manual_seed(0)
    cache = [
        torch.randn(
            SLOTS, config.num_layers, COLUMNS, config.num_kv_heads, config.head_dim, generator=noise, device="cuda"
        )
        for _ in range(2)
    ]
    mask = torch.tensor([config.mask_token_id], device="cuda")
    anchors, lengths = (
        torch.zeros(BATCH, dtype=torch.long, device="cuda"),
        torch.zeros(BATCH, dtype=torch.long, device="cuda"),
    )
    rows = torch.zeros(BATCH, dtype=torch.long, device="cuda")

    def step() -> torch.Tensor:
        embedded = draft.model.embed_tokens(torch.cat((anchors, mask)))
        block = embedded[-1].expand(BATCH, config.block_size, -1)
        hidden = draft.dflash_forward(block, lengths[:, None], lengths, *cache, rows).view(BATCH, config.block_size, -1)
        logits = draft.logits_processor(hidden[:, 1:].flatten(0, 1), draft.lm_head, None, True)
        return draft.apply_markov_chain_logits(logits.view(BATCH, config.block_size - 1, -1), anchors).argmax(-1)

    with torch.no_grad():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for seed in range(4):
            dice = torch.Generator("cuda").manual_seed(seed)
            anchors.copy_(torch.randint(0, 300, (BATCH,), generator=dice, device="cuda"))
            lengths.copy_(torch.randint(0, COLUMNS - config.block_size, (BATCH,), generator=dice, device="cuda"))
            rows.copy_(torch.randperm(SLOTS, generator=dice, device="cuda")[:BATCH])
            graph.replay()
            assert torch.equal(captured, step()), f"seed {seed}"
        assert captured.unique().numel() > 3
