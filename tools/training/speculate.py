"""The real draft-verify loop, batched: many sequences, each at its own length, one target call per round for all of them.

Per round: the drafter proposes B - 1 tokens after the anchor from its cached context, the target runs over [anchor, proposal], the
longest acceptable prefix is kept and one token of the target's own follows: the next anchor. At temperature 0 a token is kept when it is
the target's argmax, otherwise with probability min(1, p/q), and the correction is drawn from max(p - q, 0) (Leviathan et al. 2023).

Symbols: N sequences, B rows of a block, S = B - 1, V vocabulary, C cache columns, A taps, d hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.training.drafter import TrainDrafter, block_bias
from tools.training.objective import head_product
from tools.training.propose import Proposal, draw, propose
from tools.training.target import Target

PREFILL_ROWS = 64
COLUMNS = 64  # caches are looked at in multiples of this


@dataclass(frozen=True)
class Verdict:
    """``accepted`` int64 [N] in 0 .. S, ``following`` int64 [N]."""

    accepted: Tensor
    following: Tensor


def verify(logits: Tensor, proposal: Proposal, temperature: float) -> Verdict:
    """What the target keeps of a proposal and what it says next; ``logits`` fp32 [N, B, V]."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    if temperature == 0:
        choice = logits.argmax(-1)
        accepted = (choice[:, :-1] == proposal.tokens).long().cumprod(1).sum(1)
        return Verdict(accepted, choice[rows, accepted])
    p = (logits / temperature).softmax(-1)
    kept = torch.rand(proposal.tokens.shape, device=p.device) * proposal.chosen_q < p[:, :-1].gather(-1, proposal.tokens[..., None])[..., 0]
    accepted = kept.long().cumprod(1).sum(1)
    slots = proposal.tokens.shape[1]
    at = p[rows, accepted]
    rest = (at - proposal.rows(rows, accepted.clamp_max(slots - 1)) * (accepted < slots)[:, None]).clamp_min(0)
    empty = rest.sum(-1, keepdim=True) <= 0  # p == q to the last bit: p itself is the right distribution
    return Verdict(accepted, draw(torch.where(empty, at, rest), sample=True))


class Loop:
    """State of N sequences in decode: the target's cache, the drafter's context cache, text so far, the anchor's position."""

    def __init__(self, target: Target, drafter: TrainDrafter, drafts_by: str, prompts: Sequence[Sequence[int]], room: int) -> None:
        self.target, self.drafter, self.drafts_by, self.device = target, drafter, drafts_by, target.device
        self.size = drafter.shape.block_size
        longest = max(len(p) for p in prompts)
        self.columns = -(-(longest + room + 2 * self.size) // COLUMNS) * COLUMNS
        count, shape = len(prompts), drafter.shape
        self.cache = target.new_cache(count, self.columns)
        pages = (shape.num_layers, count, self.columns, shape.num_kv_heads, shape.head_dim)
        self.context = tuple(torch.zeros(pages, device=self.device, dtype=target.dtype) for _ in range(2))
        self.ids = torch.zeros(count, self.columns, dtype=torch.int64, device=self.device)
        self.lengths = torch.tensor([len(p) for p in prompts], device=self.device)  # position of the anchor once there is one
        padded = torch.zeros(count, longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
        self.ids[:, :longest] = padded.to(self.device)

    @torch.no_grad()
    def prefill(self, temperature: float) -> None:
        """Run the prompts; the target's first token becomes the anchor."""
        longest = int(self.lengths.max())
        for rows in torch.arange(len(self.ids), device=self.device).split(PREFILL_ROWS):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            ids = self.ids[part, :longest]
            cache = (self.cache[0][:, part], self.cache[1][:, part])
            tapped, final = self.target.forward(ids, self.drafter.shape.taps, cache)
            self._remember(tapped, torch.zeros_like(self.lengths[part]), part)
            last = final[torch.arange(len(ids), device=self.device), self.lengths[part] - 1]
            logits = head_product(last, self.target.head)
            first = logits.argmax(-1) if temperature == 0 else draw((logits / temperature).softmax(-1), sample=True)
            self.ids[rows, self.lengths[part]] = first

    def _remember(self, tapped: Tensor, starts: Tensor, part: slice) -> None:
        """Write the drafter's context keys and values of ``tapped`` [n, T, A*d] at positions ``starts[n] + t``."""
        positions = starts[:, None] + torch.arange(tapped.shape[1], device=self.device)
        rows = torch.arange(self.ids.shape[0], device=self.device)[part][:, None]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda" and self.target.dtype == torch.bfloat16):
            pairs = self.drafter.context(tapped.float() / self.drafter.tap_scale, self.drafter.rope(positions))
        for layer, (keys, values) in enumerate(pairs):
            self.context[0][layer][rows, positions] = keys.to(self.target.dtype)
            self.context[1][layer][rows, positions] = values.to(self.target.dtype)

    def select(self, rows: Tensor) -> None:
        """Go on with the sequences ``rows`` only (or several copies of some)."""
        self.cache = (self.cache[0][:, rows], self.cache[1][:, rows])
        self.context = (self.context[0][:, rows], self.context[1][:, rows])
        self.ids, self.lengths = self.ids[rows], self.lengths[rows]

    def _used(self) -> int:
        return min(self.columns, -(-(int(self.lengths.max()) + self.size) // COLUMNS) * COLUMNS)

    @torch.no_grad()
    def draft(self, temperature: float, sample: bool) -> Proposal:
        """A proposal for every sequence; nothing is changed."""
        shape, used = self.drafter.shape, self._used()
        anchors = self.ids.gather(1, self.lengths[:, None])
        rows = torch.cat((anchors, torch.full_like(anchors, shape.mask_token_id).expand(-1, self.size - 1)), 1)
        context = [(self.context[0][layer][:, :used], self.context[1][layer][:, :used]) for layer in range(shape.num_layers)]
        bias = block_bias(self.lengths[:, None], used, 1, self.size, shape.causal)
        rope = self.drafter.rope(self.lengths[:, None] + torch.arange(self.size, device=self.device))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda" and self.target.dtype == torch.bfloat16):
            output = self.drafter.run(self.target.embed[rows][:, None], context, rows[:, None], rope, bias)
            states = (output.hidden[:, 0], output.pre_injection[:, 0], anchors[:, 0])
            return propose(self.drafter, self.drafts_by, *states, self.target.head, temperature, sample)

    @torch.no_grad()
    def judge(self, proposal: Proposal, temperature: float) -> Verdict:
        """One target call over [anchor, proposal]; both caches then hold the block's rows, of which `commit` keeps some."""
        block = torch.cat((self.ids.gather(1, self.lengths[:, None]), proposal.tokens), 1)
        tapped, final = self.target.decode_block(block, self.lengths, self.cache, self._used(), self.drafter.shape.taps)
        self._remember(tapped, self.lengths, slice(None))
        logits = head_product(final.flatten(0, 1), self.target.head).view(*block.shape, -1)
        return verify(logits, proposal, temperature)

    def commit(self, proposal: Proposal, verdict: Verdict, moving: Tensor) -> None:
        """Write kept tokens and the next anchor of the sequences where ``moving`` is true."""
        text = torch.cat((proposal.tokens, verdict.following[:, None]), 1)
        rows = torch.arange(len(text), device=self.device)
        text[rows, verdict.accepted] = verdict.following
        positions = self.lengths[:, None] + 1 + torch.arange(self.size, device=self.device)
        self.ids[rows[:, None], torch.where(moving[:, None], positions, self.columns - self.size)] = text  # parked where none reads
        self.lengths = torch.where(moving, self.lengths + verdict.accepted + 1, self.lengths)
