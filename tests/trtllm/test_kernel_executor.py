"""The kernels behind the hooks: what the torch executor is on a GPU, here in Triton's interpreter, against the specification."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from dspine_kernels.paged import copy_committed, copy_committed_reference

from dspine_export.checkpoint.load import Checkpoint, open_checkpoint
from dspine_export.errors import UsageError
from dspine_export.model.drafter import Drafter
from dspine_export.model.loading import LoadedCheckpoint
from dspine_export.trtllm.block_executors import TorchBlock
from dspine_export.trtllm.draft_model import DSpineForCausalLM
from dspine_export.trtllm.kernel_block import open_kernels
from dspine_export.trtllm.plan_block import PlanBlock
from dspine_export.trtllm.register import _runs_kernels as runs_kernels
from dspine_export.trtllm.worker_cache import open_context

from .conftest import GOLDEN, Package, Tables
from .draft_models import give_weights, make_serving_loop
from .worker_loop import Request

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """The golden drafter cut to two layers, one of them sliding, and blocks of four: the interpreter takes seconds for every block."""
    whole = open_checkpoint(GOLDEN / "drafter")
    layers = ("full_attention", "sliding_attention")
    return replace(
        whole, config=replace(whole.config, num_layers=2, layer_types=layers, sliding_window=6, block_size=4)
    )


def bind(checkpoint: Checkpoint, tables: Tables) -> Drafter:
    embed, head = (table.to(DEVICE) for table in (tables.embed_tokens, tables.lm_head))
    return LoadedCheckpoint(checkpoint).bind(embed_tokens=embed, lm_head=head, check_codes=False)


@pytest.mark.parametrize("backend", ["VANILLA", "TRTLLM"])
def test_worker_drafts_what_the_specification_drafts(
    package: Package, checkpoint: Checkpoint, tables: Tables, backend: str
) -> None:
    """Ragged prompts, a chunked one, rejected tokens rolled back, a slot reused; both caches of the worker."""
    draft = DSpineForCausalLM(
        checkpoint.config,
        SimpleNamespace(pretrained_config=None),
        backend,
        lambda *_: open_kernels(bind(checkpoint, tables)),
    )
    give_weights(draft, tables, DEVICE)
    loop = make_serving_loop(replace(package, device=DEVICE), draft, backend, bind(checkpoint, tables))
    first, second = Request(1, list(range(5, 14))), Request(2, [7])
    loop.step(prefill=[(first, 4), (second, 1)])
    loop.step(prefill=[(first, 5)], generate=[(second, 2)])
    loop.step(generate=[(first, 0), (second, 3)])
    third = Request(3, [250, 3])
    loop.step(prefill=[(third, 2)], generate=[(first, 3)])  # the second one has left
    loop.step(generate=[(third, 1)])
    assert (first.checked_blocks, second.checked_blocks, third.checked_blocks) == (2, 2, 1)


def caches(pages: int, size: int, layers: int, heads: int, dim: int, *, dense: bool) -> tuple[torch.Tensor, ...]:
    noise = torch.Generator().manual_seed(0)
    shape = (pages, layers, size, heads, dim) if dense else (layers, pages, 2, heads, size, dim)
    return tuple(torch.randn(shape, generator=noise).to(DEVICE) for _ in range(2 if dense else 1))


@pytest.mark.parametrize("dense", [True, False], ids=["by slots", "paged"])
def test_copy_of_committed_columns(dense: bool) -> None:
    """Equal to the reference; what is beyond a length stays, and page numbers there are not looked at."""
    lengths = torch.tensor([0, 13, 5, 40], device=DEVICE)  # the last one claims more than the cache has
    if dense:
        keys, values = caches(6, 21, 3, 2, 5, dense=True)
        context = open_context(keys, values, torch.tensor([5, 0, 2, 3], device=DEVICE), None, None)
    else:
        (cache,) = caches(20, 7, 3, 2, 5, dense=False)
        table = torch.full((6, 3), -(2**30), dtype=torch.int32, device=DEVICE)
        table[0, :2], table[2, 0], table[3] = torch.tensor([19, 4]), 11, torch.tensor([1, 0, 7])
        context = open_context(None, None, torch.tensor([5, 0, 2, 3], device=DEVICE), cache, table)
    assert context.shape == (4, 2, 21, 5)
    for layer in range(3):
        got, want = (torch.full((2, *context.shape), 9.0, device=DEVICE) for _ in range(2))
        context.copy(layer, lengths, *got)
        copy_committed_reference(context.keys[layer], context.values[layer], context.pages, lengths, *want)
        assert torch.equal(got, want)
        assert (got[:, 1, :, 13:] == 9.0).all()
        assert (got[:, 0] == 9.0).all()


def test_shorter_output_cuts_the_copy() -> None:
    """A plan's profile may take fewer columns than the worker keeps."""
    keys, values = caches(2, 21, 1, 2, 5, dense=True)
    context = open_context(keys, values, torch.tensor([1, 0], device=DEVICE), None, None)
    short = torch.zeros(2, 2, 2, 8, 5, device=DEVICE)
    copy_committed(context.keys[0], context.values[0], context.pages, torch.tensor([21, 3], device=DEVICE), *short)
    whole = context.read()[0][:, 0]
    assert torch.equal(short[0, 0], whole[0, :, :8])
    assert torch.equal(short[0, 1, :, :3], whole[1, :, :3])
    assert not short[0, 1, :, 3:].any()


class Recorder:
    """A plan session that remembers its inputs."""

    def __init__(self) -> None:
        self.feeds: dict[str, torch.Tensor] = {}

    def run(self, feeds: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.feeds = feeds
        return {"transition_scores": feeds["keys"], "candidate_ids": feeds["keys"], "q": feeds["keys"]}


def test_plan_gets_the_same_committed_columns_either_way(checkpoint: Checkpoint, tables: Tables) -> None:
    config = checkpoint.config
    keys, values = caches(5, 24, config.num_layers, config.num_kv_heads, config.head_dim, dense=True)
    context = open_context(keys, values, torch.tensor([3, 1], device=DEVICE), None, None)
    lengths, feeds = torch.tensor([17, 2], device=DEVICE), []
    for copies in (False, True):
        session = Recorder()
        block = PlanBlock(config, session, tables.embed_tokens, tables.lm_head, columns=20, copies=copies)
        block.draft(torch.tensor([4, 5], device=DEVICE), context, lengths)
        feeds.append(session.feeds)
    for name in ("keys", "values"):
        whole, copied = (each[name] for each in feeds)
        assert whole.shape == copied.shape == (2, 2, config.num_kv_heads, 20, config.head_dim)
        assert whole.is_contiguous() and copied.is_contiguous()
        assert torch.equal(whole[0, :, :, :17], copied[0, :, :, :17])
        assert torch.equal(whole[1, :, :, :2], copied[1, :, :, :2])
        assert not copied[1, :, :, 2:].any()  # masked columns reach the attention: finite


def test_plan_refuses_longer_sequences_than_its_profile(checkpoint: Checkpoint, tables: Tables) -> None:
    """An edited max_seq_len would otherwise cut contexts silently; the rounding of the worker's cache is no reason."""
    config = checkpoint.config
    keys, values = caches(1, 300, config.num_layers, config.num_kv_heads, config.head_dim, dense=True)
    context = open_context(keys, values, torch.tensor([0], device=DEVICE), None, None)
    anchors, lengths = torch.tensor([4], device=DEVICE), torch.tensor([17], device=DEVICE)
    PlanBlock(config, Recorder(), tables.embed_tokens, tables.lm_head, columns=40).draft(anchors, context, lengths)
    with pytest.raises(UsageError, match=r"(?s)300 columns.*max_seq_len 39"):
        PlanBlock(config, Recorder(), tables.embed_tokens, tables.lm_head, columns=39).draft(anchors, context, lengths)


def test_weights_are_shared_not_doubled(checkpoint: Checkpoint, tables: Tables) -> None:
    network, block = open_kernels(bind(checkpoint, tables))
    held = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}
    packed = block.weights
    ours = {layer.qkv.untyped_storage().data_ptr() for layer in packed.layers}
    assert ours < held
    assert held - ours == {
        tensor.untyped_storage().data_ptr()
        for tensor in (
            packed.fc,
            packed.hidden_norm,
            *(
                norm
                for layer in network.layers
                for norm in (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
            ),
            *(norm for layer in packed.layers for norm in (layer.q_norm, layer.k_norm)),
        )
    }
    assert network.transfer_codes is None and network.injection is None


def test_causal_dflash_keeps_the_target_head(checkpoint: Checkpoint, tables: Tables) -> None:
    """Without injection only the states are ours; the rotation tables grow with a cache beyond the trained positions."""
    plain = replace(checkpoint, config=replace(checkpoint.config, transfer=None, max_position_embeddings=8))
    config = plain.config
    keys, values = caches(2, 24, config.num_layers, config.num_kv_heads, config.head_dim, dense=True)
    context = open_context(keys, values, torch.tensor([1, 0], device=DEVICE), None, None)
    anchors, lengths = torch.tensor([4, 5], device=DEVICE), torch.tensor([17, 0], device=DEVICE)
    _, block = open_kernels(bind(plain, tables))
    assert not block.own_logits
    expected = TorchBlock(bind(plain, tables)).draft(anchors, context, lengths)
    torch.testing.assert_close(block.draft(anchors, context, lengths), expected, rtol=1e-4, atol=1e-4)
    assert len(block.weights.cos) == 24 + config.block_size


def test_where_the_kernels_run(checkpoint: Checkpoint) -> None:
    """On a CPU silently, in float64 or with more candidates than they hold with a warning, the torch model drafts."""
    config = checkpoint.config
    assert config.transfer is not None
    many = replace(config, transfer=replace(config.transfer, top_k=65))
    gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runs_kernels(config, gpu)  # type: ignore[arg-type]
        assert not runs_kernels(config, torch.zeros(1))
    with pytest.warns(UserWarning, match="at most 64 candidates"):
        assert not runs_kernels(many, gpu)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="float64"):
        assert not runs_kernels(config, SimpleNamespace(is_cuda=True, dtype=torch.float64))  # type: ignore[arg-type]
