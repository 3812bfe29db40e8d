"""The draft-verify loop.

The prompt's pass yields the first token, the *anchor*: known, but not yet run through the target. Every round then drafts B-1 tokens
behind the anchor, runs [anchor, drafts] through the target once, keeps the accepted prefix, and takes the target's own token after it
as the next anchor. Greedy output is the target's own; sampled output is distributed as the target's own.

The loop reads the device once a round (`_Loop.round`); everything else it decides by what it has read before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspine_export.errors import UsageError
from dspine_export.model.output import DraftOutput
from dspine_export.model.speculative import verify_greedy, verify_sampled
from dspine_export.model.state import DraftState
from dspine_export.runtime.executor import DrafterExecutor
from dspine_export.runtime.generation import GenerationResult, OnTokens, RunningSequence, Settings
from dspine_export.runtime.proposal import first_slots
from dspine_export.runtime.ragged_cache import RaggedCache
from dspine_export.runtime.sampling import nucleus, sample
from dspine_export.runtime.target import TargetExecutor


def generate(
    target: TargetExecutor,
    executor: DrafterExecutor | None,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_ids: Iterable[int] | None = None,
    on_tokens: Callable[[list[int]], None] | None = None,
) -> GenerationResult:
    """Continues one prompt; `executor` None generates with the target alone, one token a call.

    Args:
        eos_ids: end tokens, the target's own by default.
        on_tokens: called with every piece of newly committed tokens.

    Raises:
        UsageError: a setting out of range, an empty prompt, or one that leaves no room in the target's positions.
    """
    ends = target.eos_ids if eos_ids is None else frozenset(eos_ids)
    settings = Settings(max_new_tokens, temperature, top_p, seed, ends)
    sink = None if on_tokens is None else lambda _row, tokens: on_tokens(tokens)
    return generate_batch(target, executor, [prompt_ids], settings, sink)[0]


def generate_plain(target: TargetExecutor, prompt_ids: Sequence[int], **options: object) -> GenerationResult:
    """The target alone; options as in `generate`."""
    return generate(target, None, prompt_ids, **options)  # type: ignore[arg-type]


@torch.inference_mode()
def generate_batch(
    target: TargetExecutor,
    executor: DrafterExecutor | None,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    on_tokens: OnTokens | None = None,
) -> list[GenerationResult]:
    """Continues several prompts of any lengths together; `on_tokens(row, tokens)`. Raises as `generate`."""
    sequences = [_new_sequence(target, index, prompt, settings, on_tokens) for index, prompt in enumerate(prompts)]
    if not sequences:
        return []
    loop = _start(target, executor, prompts, sequences, settings)
    while loop.sequences:
        loop.round()
    return [sequence.result() for sequence in sequences]


def _new_sequence(
    target: TargetExecutor, index: int, prompt: Sequence[int], settings: Settings, on_tokens: OnTokens | None
) -> RunningSequence:
    room = target.max_positions - len(prompt)
    if not prompt or room < 1:
        raise UsageError(
            "The prompt is empty" if not prompt else "The prompt leaves no room to generate",
            where=f"prompt {index}",
            got=f"{len(prompt)} tokens",
            expected=f"1 .. {target.max_positions - 1} tokens (the target has {target.max_positions} positions)",
        )
    return RunningSequence(index, len(prompt), min(settings.max_new_tokens, room), settings.eos_ids, on_tokens)


def _start(
    target: TargetExecutor,
    executor: DrafterExecutor | None,
    prompts: Sequence[Sequence[int]],
    sequences: list[RunningSequence],
    settings: Settings,
) -> _Loop:
    """Runs the prompts and takes the first token of each."""
    longest = max(len(prompt) for prompt in prompts)
    if executor is not None and executor.max_context is not None and longest > executor.max_context:
        executor = None
    block = 1 if executor is None else executor.config.block_size
    capacity = max(s.prompt_length + s.limit for s in sequences) + block
    state = target.new_state(len(prompts), capacity)
    contexts = None
    if executor is not None:
        contexts = executor.new_state(len(prompts), longest if executor.attends_capacity else capacity)

    def keep_context(hidden: Tensor, counts: Tensor) -> None:
        if executor is not None and contexts is not None:
            executor.append_context(contexts, hidden, counts)

    logits = target.prefill(state, prompts, keep_context)
    heat = torch.full((len(prompts),), settings.temperature, device=logits.device)
    generator = torch.Generator(device=logits.device).manual_seed(settings.seed)
    anchors = sample(nucleus(logits, heat, settings.top_p), heat, generator)
    known = anchors.tolist()
    for row, token in enumerate(known):
        sequences[row].take([token])
    loop = _Loop(target, executor, settings, generator, list(sequences), state, contexts, anchors, known)
    loop.drop_finished()
    return loop


@dataclass
class _Loop:
    """The sequences still running, row by row, with their caches and anchors."""

    target: TargetExecutor
    executor: DrafterExecutor | None
    settings: Settings
    generator: torch.Generator
    sequences: list[RunningSequence]
    state: RaggedCache
    contexts: DraftState | None
    anchors: Tensor  # int64 [N]
    known_anchors: list[int]  # the same on the host

    def round(self) -> None:
        """One target call for every running sequence."""
        heat = torch.full(self.anchors.shape, self.settings.temperature, device=self.anchors.device)
        draft = self._propose(heat)
        drafted = 0 if draft is None else draft.tokens.shape[1]
        block = self.anchors[:, None] if draft is None else torch.cat((self.anchors[:, None], draft.tokens), dim=1)
        self.state.longest = self._longest()
        step = self.target.verify(self.state, block)
        logits = nucleus(step.logits, heat, self.settings.top_p)
        accepted, following = self._judge(logits, draft, heat)
        self.target.commit(self.state, accepted + 1)
        found = torch.cat((block[:, 1:], accepted[:, None], following[:, None]), dim=1).tolist()
        self._emit(found, drafted)
        if (
            self.executor is not None
            and self.contexts is not None
            and any(s.finish_reason is None for s in self.sequences)
        ):
            counts = torch.tensor([row[drafted] + 1 for row in found])
            self.executor.append_context(self.contexts, step.hidden, counts)
        self.anchors, self.known_anchors = following, [row[-1] for row in found]
        self.drop_finished()

    def _propose(self, heat: Tensor) -> DraftOutput | None:
        """Drafted tokens [N, k], k <= B-1, with the distribution they come from; None where drafting has no use or no room."""
        executor, contexts = self.executor, self.contexts
        if executor is None or contexts is None:
            return None
        block = executor.config.block_size
        # The cache must take this round's tokens as well, and near the limit a full block would only be thrown away.
        if executor.max_context is not None and self._longest() + block > executor.max_context:
            self.executor = self.contexts = None
            return None
        width = min(block, max(sequence.remaining for sequence in self.sequences)) - 1
        # A padded head has rows the drafter does not know.
        if width < 1 or max(self.known_anchors) >= executor.config.vocab_size:
            return None
        uniforms = torch.zeros(len(self.sequences), block - 1, device=heat.device)
        if self.settings.temperature > 0:
            uniforms.uniform_(generator=self.generator)
        return first_slots(executor.draft_from(contexts, self.anchors, heat, uniforms), width)

    def _longest(self) -> int:
        """Committed tokens of the longest sequence, its anchor not counted."""
        return max(sequence.prompt_length + len(sequence.tokens) - 1 for sequence in self.sequences)

    def _judge(self, logits: Tensor, draft: DraftOutput | None, heat: Tensor) -> tuple[Tensor, Tensor]:
        """Accepted drafts and the token after them, int64 [N] each. logits [N, 1 + k, V]"""
        if draft is None:
            greedy = self.settings.temperature == 0
            following = logits[:, 0].argmax(-1) if greedy else sample(logits[:, 0], heat, self.generator)
            return torch.zeros_like(self.anchors), following
        if self.settings.temperature == 0:
            verdict = verify_greedy(logits, draft.tokens)
        else:
            assert draft.candidate_ids is not None and draft.q is not None
            verdict = verify_sampled(logits, draft.tokens, draft.candidate_ids, draft.q, heat, self.generator)
        return verdict.accepted, verdict.next_token

    def _emit(self, found: list[list[int]], drafted: int) -> None:
        """found[n]: the drafted tokens, how many were accepted, the token after them."""
        for sequence, row in zip(self.sequences, found, strict=True):
            count = row[drafted]
            kept = sequence.take([*row[:count], row[-1]])
            sequence.statistics.record(drafted, min(count, kept), kept)

    def drop_finished(self) -> None:
        """Takes finished sequences out of the batch."""
        running = [row for row, sequence in enumerate(self.sequences) if sequence.finish_reason is None]
        if len(running) == len(self.sequences):
            return
        self.sequences = [self.sequences[row] for row in running]
        if not running:
            return
        rows = torch.tensor(running, device=self.anchors.device)
        self.anchors, self.known_anchors = self.anchors[rows], [self.known_anchors[row] for row in running]
        self.state = self.target.select(self.state, rows)
        if self.executor is not None and self.contexts is not None:
            self.contexts = self.executor.select(self.contexts, torch.tensor(running))
