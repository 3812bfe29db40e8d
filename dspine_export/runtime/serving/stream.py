"""One request inside the engine: from its prompt's tokens to its last event."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from dspine_export.runtime.generation import FinishReason, RunningSequence
from dspine_export.runtime.serving.draws import Draws, Uniforms
from dspine_export.runtime.serving.handle import Event, Finished, Handle, Piece
from dspine_export.runtime.serving.output_text import OutputText
from dspine_export.runtime.serving.request import Completion


@dataclass(eq=False)
class Stream:
    """State of one sequence. The loop's thread chooses tokens, the emitter's turns them into text; each has fields of its own.

    Attributes:
        prompt: token ids. sequence: its end and limit, the loop's; its acceptance counters, the emitter's.
        output, emitted, near_ties: text and tokens so far, the emitter's. stopped: set by the emitter once the last event is made.
        temperature, top_p, draws: how its tokens are chosen. draft_tokens: most to draft per round, 0 once it has stopped drafting.
        expires_at: on the monotonic clock, None for never.
        slot: of both caches, -1 while it waits. prefilled: prompt tokens already in the target's cache.
        anchor: its last token, not yet run through the target.
        unread: rounds that have been queued for it and whose tokens are not committed yet.
    """

    handle: Handle
    prompt: list[int]
    sequence: RunningSequence
    output: OutputText
    draws: Draws
    temperature: float
    top_p: float
    draft_tokens: int
    submitted_at: float
    expires_at: float | None = None
    slot: int = -1
    prefilled: int = 0
    anchor: int = -1
    unread: int = 0
    near_ties: int = 0
    stopped: bool = False
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    emitted: list[int] = field(default_factory=list)
    _drawn: deque[Uniforms] = field(default_factory=deque)
    _unsent: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.sequence.finish_reason is not None

    @property
    def remaining_prompt(self) -> int:
        return len(self.prompt) - self.prefilled

    def next_uniforms(self) -> Uniforms:
        """Random numbers of the round behind those unread; the same again until that round has been committed."""
        while len(self._drawn) <= self.unread:
            self._drawn.append(self.draws.round())
        return self._drawn[self.unread]

    def commit(self, tokens: list[int]) -> list[int]:
        """Takes a round's tokens (the last is the next anchor) up to an end token or the limit; returns those that were kept."""
        self.anchor = tokens[-1]
        if self._drawn:
            self._drawn.popleft()
        if not self.first_token_at:
            self.first_token_at = time.monotonic()
        return tokens[: self.sequence.take(tokens)]

    def event(
        self, tokens: list[int], reason: FinishReason | None, checked: tuple[int, int] | None, near_ties: int
    ) -> tuple[int, Event | None]:
        """For the emitter: detokenises committed tokens and makes the event that says what became certain, None if nothing did.

        `reason` comes with the last tokens. `checked` are the drafted and accepted tokens of the round that committed them, None for the
        prompt's pass. Returns also how many tokens belong to the output, fewer than given where a stop word ended it.
        """
        count, text = self.output.push(tokens)
        self.emitted += tokens[:count]
        self._unsent += tokens[:count]
        self.near_ties += near_ties
        if checked is not None:
            self.sequence.statistics.record(checked[0], min(checked[1], count), count)
        reason = "stop" if self.output.stopped else reason
        if reason is not None:
            self.stopped = True
            text += self.output.finish()
            return count, Finished(text, self._take_unsent(), self._completion(reason))
        return count, Piece(text, self._take_unsent()) if text else None

    def _take_unsent(self) -> list[int]:
        tokens, self._unsent = self._unsent, []
        return tokens

    def _completion(self, reason: FinishReason) -> Completion:
        return Completion(
            text=self.output.text,
            token_ids=self.emitted,
            finish_reason=reason,
            prompt_tokens=len(self.prompt),
            statistics=self.sequence.statistics,
            near_ties=self.near_ties,
            queue_seconds=self.admitted_at - self.submitted_at,
            first_token_seconds=self.first_token_at - self.submitted_at,
            seconds=time.monotonic() - self.submitted_at,
        )


def probe_stream(slot: int, block_size: int) -> Stream:
    """A stream of one prompt token in `slot` that belongs to nobody."""
    return Stream(
        handle=Handle(lambda: None),
        prompt=[0],
        sequence=RunningSequence(0, 1, block_size + 1, frozenset()),
        output=OutputText(None, ()),
        draws=Draws(0, block_size, greedy=True),
        temperature=0.0,
        top_p=1.0,
        draft_tokens=block_size - 1,
        submitted_at=0.0,
        slot=slot,
    )
