"""One request inside the engine: from its prompt's tokens to its last event."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from dspine_export.runtime.generation import RunningSequence
from dspine_export.runtime.serving.draws import Draws, Uniforms
from dspine_export.runtime.serving.handle import Event, Finished, Handle, Piece
from dspine_export.runtime.serving.output_text import OutputText
from dspine_export.runtime.serving.request import Completion


@dataclass(eq=False)
class Stream:
    """State of one sequence, touched by the engine's thread only.

    Attributes:
        prompt: token ids. sequence: its end, limit and acceptance counters.
        temperature, top_p, draws: how its tokens are chosen. draft_tokens: most to draft per round, 0 once it has stopped drafting.
        expires_at: on the monotonic clock, None for never.
        slot: of both caches, -1 while it waits. prefilled: prompt tokens already in the target's cache.
        anchor: its last token, not yet run through the target.
        uniforms: the current round's random numbers.
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
    uniforms: Uniforms | None = None
    near_ties: int = 0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    _unsent: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.sequence.finish_reason is not None

    @property
    def remaining_prompt(self) -> int:
        return len(self.prompt) - self.prefilled

    def begin_round(self) -> Uniforms:
        """This round's random numbers; the same again while the round has not been completed."""
        if self.uniforms is None:
            self.uniforms = self.draws.round()
        return self.uniforms

    def commit(self, tokens: list[int]) -> int:
        """Takes a round's tokens (the last is the next anchor) up to an end token or the limit; returns how many were kept."""
        self.anchor, self.uniforms = tokens[-1], None
        if not self.first_token_at:
            self.first_token_at = time.monotonic()
        return self.sequence.take(tokens)

    def event(self, kept: int, checked: tuple[int, int] | None = None) -> tuple[int, Event | None]:
        """Detokenises the `kept` tokens committed last and makes the event that says what became certain, None if nothing did.

        `checked` are the drafted and accepted tokens of the round that committed them, None for the prompt's pass. Returns also how
        many tokens belong to the output, fewer than `kept` where a stop word ended it.
        """
        tokens = self.sequence.tokens[len(self.sequence.tokens) - kept :]
        count, text = self.output.push(tokens)
        if self.output.stopped:
            del self.sequence.tokens[len(self.sequence.tokens) - (kept - count) :]
            self.sequence.finish_reason = "stop"
        self._unsent += tokens[:count]
        if checked is not None:
            self.sequence.statistics.record(checked[0], min(checked[1], count), count)
        if self.finished:
            text += self.output.finish()
            return count, Finished(text, self._take_unsent(), self._completion())
        return count, Piece(text, self._take_unsent()) if text else None

    def _take_unsent(self) -> list[int]:
        tokens, self._unsent = self._unsent, []
        return tokens

    def _completion(self) -> Completion:
        assert self.sequence.finish_reason is not None
        return Completion(
            text=self.output.text,
            token_ids=self.sequence.tokens,
            finish_reason=self.sequence.finish_reason,
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
