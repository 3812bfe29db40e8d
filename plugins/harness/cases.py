"""Shapes and inputs of the plugin checks: real sizes, and sizes that miss every tile boundary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """Sizes of one check; `timed` ones appear in the timing table."""

    name: str
    batch: int
    block: int
    hidden: int
    rank: int
    message: int
    candidates: int
    vocab: int
    timed: bool = False


CASES = (
    Case("qwen3-8b N=1", 1, 16, 4096, 1024, 512, 16, 151936, timed=True),
    Case("qwen3-8b N=8", 8, 16, 4096, 1024, 512, 16, 151936, timed=True),
    Case("qwen3-8b N=32", 32, 16, 4096, 1024, 512, 16, 151936, timed=True),
    Case("smallest", 1, 2, 16, 16, 16, 1, 40),
    Case("scalar sizes", 2, 3, 1, 1, 1, 2, 5),
    Case("multiples of 8", 3, 7, 200, 72, 40, 5, 1000),
    Case("no multiples", 5, 4, 130, 33, 17, 64, 300),
    Case("tiles end inside chunks", 2, 8, 272, 80, 112, 48, 512),
    Case("most candidates", 1, 32, 256, 64, 48, 64, 999),
    Case("K over a tile", 3, 6, 144, 1040, 528, 17, 700),
    Case("two tiles of K", 7, 6, 144, 96, 160, 32, 256),
    Case("many sequences", 70, 5, 64, 32, 32, 8, 128),
)


def injection_operands(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> list[Tensor]:
    """Operands of AdjacentInjection in schema order, with variances like a trained drafter's and one row of zeros."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    hidden = normal(case.batch, case.block, case.hidden, scale=3.0)
    hidden[-1, -1] = 0
    return [
        hidden,
        normal(case.batch, case.block, case.rank),
        normal(case.batch, 2 * case.message),
        normal(case.message, case.rank, scale=case.rank**-0.5),
        normal(case.message, case.rank, scale=case.rank**-0.5),
        normal(case.message, case.rank, scale=case.rank**-0.5),
        normal(case.message),
        normal(case.hidden, case.message, scale=case.message**-0.5),
    ]


def transition_operands(
    case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> list[Tensor]:
    """Operands of TransitionScores in schema order; some ids are repeated and some lie outside the vocabulary."""

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    slots = case.block - 1
    candidates = torch.randint(case.vocab, (case.batch, slots, case.candidates), generator=generator, device=device)
    candidates[0, 0, 0] = case.vocab + 7
    candidates[-1, -1, -1] = -3
    anchors = torch.randint(case.vocab, (case.batch,), generator=generator, device=device)
    return [
        normal(case.batch, slots, case.hidden, scale=3.0),
        normal(case.batch, slots, case.message),
        anchors,
        candidates,
        normal(case.vocab, 2 * case.message),
        normal(case.hidden, case.message, scale=case.message**-0.5),
        1 + normal(case.hidden, scale=0.1),
        normal(case.vocab, case.hidden, scale=0.02),
    ]


def walk_operands(case: Case, device: torch.device, generator: torch.Generator) -> list[Tensor]:
    """Operands of LatticeWalk in schema order: ties in every row, greedy and sampled sequences mixed, uniforms at both ends."""
    slots, k = case.block - 1, case.candidates
    scores = torch.randn((case.batch, slots, k, k), generator=generator, device=device) * 4
    scores = (scores * 2).round() / 2
    candidates = torch.randint(case.vocab, (case.batch, slots, k), generator=generator, device=device)
    temperature = (
        torch.tensor([0.0, 1.0, 0.3, 2.0], device=device).repeat(case.batch // 4 + 1)[: case.batch].contiguous()
    )
    uniforms = torch.rand((case.batch, slots), generator=generator, device=device)
    uniforms[0, -1] = 0.0
    uniforms[-1, 0] = 1 - 2**-24
    return [scores, candidates, temperature, uniforms]
