"""The largest batches and blocks: 256 ragged sequences, empty ones too, blocks of up to 32, up to 64 candidates. On a GPU only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_kernels.attention import (
    append_context,
    append_context_reference,
    block_attention,
    block_attention_reference,
)
from dspine_kernels.attention.block import partial_sizes
from dspine_kernels.topk import top_candidates
from dspine_kernels.topk.kernel import top_candidates_reference, workspace_keys
from dspine_kernels.transition import (
    TransitionScratch,
    fold_scores,
    lattice_walk_reference,
    transition_scores,
    transition_scores_reference,
    walk_choices,
)
from torch import Tensor

from dspine_export.checkpoint.config import TransferConfig
from dspine_export.runtime.bench.subjects import QWEN3_8B, random_drafter
from dspine_export.runtime.kernel_pass import CacheView, ContextPass, DraftPass
from dspine_export.runtime.packed_weights import pack
from tests.kernels.comparison import close, poisoned, randn

BATCH, LONGEST = 256, 40
SIZES = [(2, 1), (16, 16), (32, 64)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="256 sequences take minutes under Triton's interpreter"),
    pytest.mark.parametrize(("block", "count"), SIZES),
]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def ragged(device: torch.device) -> Tensor:
    """Lengths [BATCH]: empty first, in between and last, and a full one."""
    lengths = torch.randint(1, LONGEST, (BATCH,), device=device)
    lengths[::7], lengths[-1], lengths[1] = 0, 0, LONGEST
    return lengths


def tables(columns: int, dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(float(columns)), 100.0 ** -(torch.arange(0, dim, 2) / dim)).to(device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def test_attention(block: int, count: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    heads, kv_heads, dim = 4, 2, 16
    lengths = ragged(device)
    beyond = (torch.arange(LONGEST, device=device) >= lengths[:, None])[:, None, :, None]
    for dtype in dtypes:
        cache = [randn(BATCH, kv_heads, LONGEST, dim, device=device, dtype=dtype) for _ in range(2)]
        cache = [tensor.masked_fill(beyond, float("nan")) for tensor in cache]
        qkv = randn(BATCH * block, (heads + 2 * kv_heads) * dim, device=device, dtype=dtype)
        norms = [randn(dim, device=device, dtype=dtype) for _ in range(2)]
        cos, sin = tables(LONGEST + block, dim, device, dtype)
        want = block_attention_reference(qkv, *norms, 1e-6, cos, sin, lengths, *cache, heads, block, True, None)
        for splits in (1, 3):
            out = poisoned(BATCH * block, heads * dim, device=device, dtype=dtype)
            scratch = [poisoned(n, device=device) for n in partial_sizes(BATCH, kv_heads, heads, dim, block, splits)]
            block_attention(
                qkv, *norms, 1e-6, cos, sin, lengths, *cache, out, *scratch, block=block, causal=True, window=None, splits=splits
            )  # fmt: skip
            close(out, want, dtype)


def test_append(block: int, count: int, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    heads, dim = 2, 16
    lengths, counts = ragged(device), torch.randint(0, block + 1, (BATCH,), device=device)
    for dtype in dtypes:
        rows, norm = (
            randn(BATCH, block, 2 * heads * dim, device=device, dtype=dtype),
            randn(dim, device=device, dtype=dtype),
        )
        got, want = (
            [torch.zeros(BATCH, heads, LONGEST + block, dim, device=device, dtype=dtype) for _ in range(2)]
            for _ in range(2)
        )
        rotation = tables(LONGEST + block, dim, device, dtype)
        append_context(rows, norm, 1e-6, *rotation, lengths, counts, *got)
        append_context_reference(rows, norm, 1e-6, *rotation, lengths, counts, *want)
        for mine, reference in zip(got, want, strict=True):
            close(mine, reference, dtype)


def test_candidates_scores_and_walk(
    block: int, count: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Candidates with ties, scores from poisoned scratch, tokens and q of greedy and sampled sequences."""
    hidden, m, vocabulary, slots = 40, 8, 300, BATCH * (block - 1)
    heat, uniforms = torch.rand(BATCH, device=device).round(decimals=1), torch.rand(BATCH, block - 1, device=device)
    heat[::2] = 0
    for dtype in dtypes:
        logits = randn(BATCH * block, vocabulary, device=device, dtype=torch.float32).mul(4).round()
        ids = torch.full((slots, count), -1, dtype=torch.int64, device=device)
        keys = torch.zeros(workspace_keys(slots, vocabulary), dtype=torch.int64, device=device)
        top_candidates(logits, ids, keys, block)
        drafted = logits.view(BATCH, block, -1)[:, 1:].reshape(slots, -1)
        assert torch.equal(ids, top_candidates_reference(drafted, count))
        candidates = ids.view(BATCH, block - 1, count)
        pre = randn(BATCH, block, hidden, device=device, dtype=dtype, scale=2.0)
        receiver = torch.randn(BATCH, block, m, device=device)
        anchors = torch.randint(0, vocabulary, (BATCH,), device=device)
        table, head = (randn(vocabulary, n, device=device, dtype=dtype) for n in (2 * m, hidden))
        write, gain = randn(hidden, m, device=device, dtype=dtype, scale=0.2), randn(hidden, device=device, dtype=dtype)
        scores = poisoned(BATCH, block - 1, count, count, device=device)
        squares = pre.float().pow(2).unflatten(-1, (4, -1)).sum(-1).flatten(0, 1).T.contiguous()
        pull = (pre.float() @ write.float()).to(dtype).flatten(0, 1)
        scratch = TransitionScratch.of(slots, count, m, head)
        for tensor in (scratch.z, scratch.gram_z, scratch.unary, scratch.soft):
            tensor.fill_(float("nan"))
        transition_scores(
            pre.flatten(0, 1), squares, pull, receiver, anchors, candidates, table, *fold_scores(head, gain, write), gain, head, 1e-6,
            heat, uniforms, scores, scratch, block,
        )  # fmt: skip
        close(
            scores,
            transition_scores_reference(pre, receiver, anchors, candidates, table, write, gain, head, 1e-6),
            dtype,
        )
        tokens, q = torch.full_like(candidates[..., 0], -1), poisoned(BATCH, block - 1, count, device=device)
        walk_choices(scratch.choices, scratch.soft, candidates, heat, tokens, q)
        want_tokens, want_q = lattice_walk_reference(scores, candidates, heat, uniforms)
        assert torch.equal(tokens, want_tokens)
        close(q, want_q, torch.float32)


def test_whole_pass(block: int, count: int, device: torch.device) -> None:
    """Append and draft against the eager model in float32; where two scores differ by rounding alone a token may differ."""
    config = replace(
        QWEN3_8B, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96, vocab_size=96,
        block_size=block, mask_token_id=95, target_layer_ids=(0, 2), layer_types=("full_attention",) * 2,
        transfer=TransferConfig(rank=16, message_size=8, top_k=count),
    )  # fmt: skip
    drafter, lengths = random_drafter(config, torch.float32, str(device)), ragged(device)
    anchors = torch.randint(0, 95, (BATCH,), device=device)
    hidden = torch.randn(BATCH, LONGEST, config.num_taps * config.hidden_size, device=device)
    reference = drafter.new_state(BATCH, LONGEST + block)
    drafter.append_context(reference, hidden, lengths)
    want = drafter.draft_from(reference, anchors)
    state, weights = drafter.new_state(BATCH, LONGEST + block), pack(drafter, LONGEST + 2 * block)
    cache = CacheView(state.keys, state.values, state.lengths)
    append = ContextPass(config, weights, cache, LONGEST)
    append.target_hidden.copy_(hidden)
    append.counts.copy_(lengths)
    append.launch()
    assert torch.equal(cache.lengths, lengths)
    draft = DraftPass(config, weights, cache)
    draft.tokens.fill_(-1)
    draft.anchor_ids.copy_(anchors)
    draft.launch()
    assert float((draft.tokens == want.tokens).float().mean()) > 0.995
    empty = lengths == 0
    assert float((draft.tokens[empty] == want.tokens[empty]).float().mean()) > 0.99
