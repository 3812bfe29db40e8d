"""A fake serving loop around TensorRT-LLM's worker, and the reference beside it.

The target is scripted: its tapped states are a fixed function of token and position, and each step says how many drafted tokens the
target happens to agree with. Whatever the worker then drafts must equal, token for token, what the specification drafts from the
committed tokens alone; an executor that deviates within known bounds brings a judge of its own (`parted_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dspine_export.model.drafter import Drafter
from dspine_export.model.output import DraftOutput


@dataclass
class Request:
    """``tokens``: prompt, then everything committed; ``prefilled``: prompt tokens already run; ``drafts``: of the last step."""

    id: int
    tokens: list[int]
    prefilled: int = 0
    anchor: int | None = None
    drafts: list[int] = field(default_factory=list)
    checked_blocks: int = 0


Judge = Callable[[Request, DraftOutput], None]
"""Compares a request's drafts with the specification's block of the same committed tokens."""


def equal_tokens(request: Request, specified: DraftOutput) -> None:
    """The judge unless another is given."""
    want = specified.tokens[0, : len(request.drafts)].tolist()
    assert request.drafts == want, f"request {request.id} after {len(request.tokens)} tokens"


class ScriptedTarget:
    """States [n, A, d] of tokens at positions, and logits that choose given tokens."""

    def __init__(self, vocab: int, taps: int, hidden: int, device: str, seed: int = 0) -> None:
        noise = torch.Generator().manual_seed(seed)
        self.by_token = torch.randn(vocab, taps, hidden, generator=noise).to(device)
        self.by_position = torch.randn(512, taps, hidden, generator=noise).to(device)

    def states(self, tokens: Sequence[int], start: int) -> Tensor:
        positions = torch.arange(start, start + len(tokens))
        return self.by_token[torch.tensor(tokens)] + self.by_position[positions]

    def logits(self, choices: Sequence[int]) -> Tensor:
        return (
            torch.nn.functional.one_hot(torch.tensor(choices), self.by_token.shape[0]).float().to(self.by_token.device)
        )


class ServingLoop:
    """Steps of mixed batches: prefill chunks first, then requests that generate, as TensorRT-LLM orders them."""

    def __init__(
        self,
        worker: Any,
        metadata: Any,
        draft_model: Any,
        target: ScriptedTarget,
        taps: tuple[int, ...],
        reference: Drafter,
    ) -> None:
        self.worker, self.metadata, self.draft_model, self.target = worker, metadata, draft_model, target
        self.taps, self.reference = taps, reference
        self.device = target.by_token.device
        self.judge: Judge = equal_tokens

    def step(self, prefill: Sequence[tuple[Request, int]] = (), generate: Sequence[tuple[Request, int]] = ()) -> None:
        """prefill: (request, tokens of this chunk); generate: (request, drafted tokens the target agrees with)."""
        drafted, rows, ids, positions, choices, lengths = self.metadata.runtime_draft_len, [], [], [], [], []
        for request, count in prefill:
            chunk = request.tokens[request.prefilled : request.prefilled + count]
            rows.append(self.target.states(chunk, request.prefilled))
            ids += chunk
            positions += range(request.prefilled, request.prefilled + count)
            choices.append((sum(request.tokens) * 7 + 3) % self.target.by_token.shape[0])
            lengths.append(count)
        for request, agreed in generate:
            assert request.anchor is not None
            block, start = [request.anchor, *request.drafts], len(request.tokens)
            rows.append(self.target.states(block, start))
            ids += block
            positions += range(start, start + len(block))
            choices += self._verdict(request, agreed)
            lengths.append(drafted + 1)
        batch = [*(request for request, _ in prefill), *(request for request, _ in generate)]
        outputs = self._forward(batch, len(prefill), rows, ids, positions, choices, lengths)
        for row, (request, count) in enumerate(prefill):
            request.prefilled += count
            if request.prefilled == len(request.tokens):  # the token sampled after an unfinished prompt is dropped
                request.anchor = int(outputs["new_tokens"][row, 0])
                request.drafts = outputs["next_draft_tokens"][row].tolist()
        for row, (request, agreed) in enumerate(generate, start=len(prefill)):
            self._commit(request, agreed, outputs, row)

    def _verdict(self, request: Request, agreed: int) -> list[int]:
        """The target's choice at every block slot: the drafts up to `agreed`, then another token."""
        vocab = self.target.by_token.shape[0]
        other = [(token + 1 + slot) % vocab for slot, token in enumerate([*request.drafts, request.tokens[-1]])]
        return [*request.drafts[:agreed], *other[agreed:]]

    def _forward(
        self,
        batch: list[Request],
        contexts: int,
        rows: list[Tensor],
        ids: list[int],
        positions: list[int],
        choices: list[int],
        lengths: list[int],
    ) -> dict[str, Tensor]:
        self.metadata.request_ids = [request.id for request in batch]
        self.metadata.num_generations = len(batch) - contexts
        drafts = [request.drafts for request in batch[contexts:]]
        self.metadata.draft_tokens = torch.tensor(drafts, dtype=torch.int32, device=self.device).flatten()
        self.metadata.prepare()
        states = torch.cat(rows)  # [n, A, d], taps in the checkpoint's order
        for tap, layer in enumerate(self.taps):
            whole = states[:, tap]
            self.metadata.maybe_capture_hidden_states(layer, whole * 0.25, whole * 0.75)
        attention = SimpleNamespace(
            num_seqs=len(batch),
            num_contexts=contexts,
            num_ctx_tokens=sum(lengths[:contexts]),
            _seq_lens=torch.tensor(lengths),
            _seq_lens_cuda=torch.tensor(lengths, device=self.device),
            max_seq_len=96,
            kv_cache_manager=None,
            prepare_for_spec_dec=lambda *names: None,
            restore_from_spec_dec=lambda: None,
            update_for_spec_dec=lambda: None,
        )
        return self.worker._forward_impl(
            torch.tensor(ids, device=self.device),
            torch.tensor([positions], device=self.device),
            states[:, 0],
            self.target.logits(choices),
            attention,
            self.metadata,
            self.draft_model,
        )

    def _commit(self, request: Request, agreed: int, outputs: dict[str, Tensor], row: int) -> None:
        count = int(outputs["new_tokens_lens"][row])
        assert count == agreed + 1, "the script and the worker disagree about what was accepted"
        assert request.anchor is not None
        accepted = outputs["new_tokens"][row, :count].tolist()
        request.tokens += [request.anchor, *accepted[:-1]]
        request.anchor, request.drafts = accepted[-1], outputs["next_draft_tokens"][row].tolist()
        self.judge(request, self._specified(request))
        request.checked_blocks += 1

    def _specified(self, request: Request) -> DraftOutput:
        """What the specification drafts from the committed tokens, computed from scratch."""
        states = self.target.states(request.tokens, 0).flatten(1)[None].to(self.reference.embed_tokens)
        lengths = torch.tensor([len(request.tokens)], device=states.device)
        assert request.anchor is not None
        anchors = torch.tensor([request.anchor], device=states.device)
        return self.reference.draft(anchors, states, lengths, return_intermediates=True)


def serve(loop: ServingLoop) -> int:
    """Ragged prompts, chunks, every kind of rejection, a request that leaves and one that joins. The number of judged blocks."""
    first, second, long = Request(1, list(range(9))), Request(2, [7]), Request(3, list(range(40, 80)))
    loop.step(prefill=[(first, 9), (second, 1), (long, 16)])
    loop.step(prefill=[(long, 24)], generate=[(first, 3), (second, 0)])
    for accepted in ((0, 7, 2), (7, 1, 0), (4, 4, 7)):
        loop.step(generate=list(zip((first, second, long), accepted, strict=True)))
    joined = Request(4, [5, 200, 31])
    loop.step(prefill=[(joined, 3)], generate=[(second, 6), (long, 1)])  # the first one has left
    loop.step(generate=[(joined, 2), (second, 0), (long, 5)])
    loop.step(generate=[(joined, 7)])
    return sum(request.checked_blocks for request in (first, second, long, joined))
