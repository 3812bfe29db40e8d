"""The CUDA path of injection and decoding, run in Triton's interpreter against the torch path. No engine involved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspine_export.checkpoint.config import DrafterConfig, TransferConfig
from dspine_export.vllm import block_injection, fused_messages, target_head
from dspine_export.vllm.block_decoding import BlockDecoder, Draws, MessageSpace
from dspine_export.vllm.injection_weights import FoldedInjection
from dspine_export.vllm.narrow_head import NarrowHead
from dspine_export.vllm.target_head import TargetHead

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, HIDDEN, BLOCK, COUNT, REQUESTS, EPS = 300, 64, 6, 8, 3, 1e-6


def drafter() -> DrafterConfig:
    return DrafterConfig(
        layout="specforge", architecture="DSpineDraftModel", hidden_size=HIDDEN, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        intermediate_size=96, vocab_size=VOCABULARY, rms_norm_eps=EPS, rope_theta=1e4, max_position_embeddings=64, block_size=8,
        mask_token_id=0, target_layer_ids=(0,), num_target_layers=2, is_causal=True, layer_types=("full_attention",) * 2,
        sliding_window=None, dtype=None, transfer=TransferConfig(rank=32, message_size=16, top_k=COUNT),
    )  # fmt: skip


@pytest.fixture
def weights() -> FoldedInjection:
    torch.manual_seed(0)
    injection = FoldedInjection(drafter())
    for parameter in injection.parameters():
        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return injection.to(DEVICE)


def states(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(REQUESTS * BLOCK, HIDDEN, generator=generator)
    return hidden.to(DEVICE), torch.randint(0, VOCABULARY, (REQUESTS,), generator=generator).to(DEVICE)


def decoder(weights: FoldedInjection, rows: slice = slice(None)) -> BlockDecoder:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(DEVICE)[rows]
    norm = torch.linspace(0.5, 1.5, HIDDEN, device=DEVICE)
    head = TargetHead(weight, rows.start or 0, 1, lambda x: x, lambda x: x)
    return BlockDecoder(weights, norm, EPS, head, BLOCK, COUNT, MessageSpace.of(weights, norm, head))


def draws(heat: list[float]) -> Draws:
    uniforms = torch.rand(REQUESTS, BLOCK - 1, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    tokens = torch.zeros(REQUESTS, BLOCK - 1, dtype=torch.int64, device=DEVICE)
    return Draws(torch.tensor(heat, device=DEVICE), uniforms, tokens)


@pytest.fixture(params=["few rows", "many rows"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of the products, whatever the test's number of rows and type."""
    for module in (fused_messages, target_head):
        monkeypatch.setattr(module, "few", lambda _: request.param == "few rows")


@pytest.mark.usefixtures("rows")
def test_injection(weights: FoldedInjection) -> None:
    hidden, anchors = states(1)
    norm = torch.linspace(0.5, 1.5, HIDDEN, device=DEVICE)
    own = (
        weights.readout_weight(0),
        weights.gates,
        weights.bias,
        weights.token_table,
        weights.write_weight(0),
        norm,
        EPS,
        BLOCK,
    )
    for fused, eager in zip(
        block_injection._fused(hidden, anchors, *own), block_injection._eager(hidden, anchors, *own), strict=True
    ):
        torch.testing.assert_close(fused, eager, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("heat", [[0.0, 0.0, 0.0], [1.0, 0.0, 0.6]], ids=["greedy", "mixed"])
def test_decoding(weights: FoldedInjection, heat: list[float]) -> None:
    hidden, anchors = states(3)
    whole, eager, fused = decoder(weights), draws(heat), draws(heat)
    candidates, q = whole._eager(hidden, anchors, eager)
    own_candidates, own_q = whole._fused(hidden, anchors, fused)
    assert torch.equal(own_candidates, candidates)
    assert torch.equal(fused.tokens, eager.tokens)
    torch.testing.assert_close(own_q, q, rtol=1e-4, atol=1e-5)


def test_decoding_with_the_sums_of_the_layers(weights: FoldedInjection) -> None:
    """The kernel that wrote the states left parts of their sums of squares: the last write and norm cost no launch of their own."""
    hidden, anchors = states(3)
    whole, eager, fused = decoder(weights), draws([1.0, 0.0, 0.6]), draws([1.0, 0.0, 0.6])
    candidates, q = whole._eager(hidden, anchors, eager)
    sums = hidden.pow(2).unflatten(1, (4, -1)).sum(-1).T.contiguous()
    own_candidates, own_q = whole._fused(hidden, anchors, fused, sums)
    assert torch.equal(own_candidates, candidates)
    assert torch.equal(fused.tokens, eager.tokens)
    torch.testing.assert_close(own_q, q, rtol=1e-4, atol=1e-5)


def test_candidates_by_a_rounded_copy(weights: FoldedInjection) -> None:
    """A copy whose own order of the best differs shortlists them; the head's rows decide. Rows may be of any scale."""
    whole, kind = decoder(weights), torch.float8_e4m3fn if DEVICE == "cuda" else torch.float32
    weight = whole.head.weight
    scales = weight.abs().amax(1) / 448
    mantissa, exponent = torch.frexp(weight / scales[:, None])
    rounded = torch.ldexp(
        (mantissa * 16).round() / 16, exponent
    )  # e4m3's four significant bits; the interpreter has no such type
    narrow = NarrowHead(rounded.to(kind), scales)
    hidden, _ = states(8)
    wanted = whole.head.candidates(hidden.view(-1, BLOCK, HIDDEN)[:, 1:], COUNT)
    by_copy = (hidden.view(-1, BLOCK, HIDDEN)[:, 1:] @ (rounded * scales[:, None]).T).topk(COUNT).indices
    assert not torch.equal(by_copy, wanted)
    hidden = hidden * torch.logspace(-3, 3, len(hidden), device=DEVICE)[:, None]
    head = replace(whole.head, narrow=narrow)
    assert torch.equal(head.fused_candidates(hidden, BLOCK, COUNT), wanted)
    hidden[:BLOCK] = float("nan")  # a request gone wrong must not lead out of the tables
    found = head.fused_candidates(hidden, BLOCK, COUNT)
    assert torch.equal(found[1:], wanted[1:])
    assert bool(((found[0] >= 0) & (found[0] < VOCABULARY)).all())


class TwoRanks:
    """Collectives of two ranks that run one after the other, in sweeps: each finds what the other gave in its last run."""

    def __init__(self) -> None:
        self.given: list[dict[int, Tensor]] = [{}, {}]
        self.rank = self.call = 0

    def start(self, rank: int) -> None:
        self.rank, self.call = rank, 0

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        self.call += 1
        self.given[self.rank][self.call] = mine
        return [ranks.get(self.call, mine) for ranks in self.given]

    def gather(self, mine: Tensor) -> Tensor:
        return torch.cat(self._exchange(mine), dim=-1)

    def reduce(self, mine: Tensor) -> Tensor:
        first, second = self._exchange(mine)
        return first + second


@pytest.mark.parametrize("path", ["_eager", "_fused"])
def test_a_sharded_head_drafts_as_a_whole_one(weights: FoldedInjection, path: str) -> None:
    hidden, anchors = states(4)
    wanted = draws([0.0, 0.8, 0.0])
    candidates, q = decoder(weights)._eager(hidden, anchors, wanted)
    ranks, split = TwoRanks(), 170
    parts = [decoder(weights, rows) for rows in (slice(0, split), slice(split, VOCABULARY))]
    got = draws([0.0, 0.8, 0.0])
    for _ in range(3):  # both ranks' candidates are right after the second sweep at the latest, then the scores
        for rank, part in enumerate(parts):
            ranks.start(rank)
            head = replace(part.head, shards=2, gather=ranks.gather, reduce=ranks.reduce)
            own_candidates, own_q = getattr(replace(part, head=head), path)(hidden, anchors, got)
    assert torch.equal(own_candidates, candidates)
    assert torch.equal(got.tokens, wanted.tokens)
    torch.testing.assert_close(own_q, q, rtol=1e-4, atol=1e-5)
