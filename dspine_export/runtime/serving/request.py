"""What a caller asks for and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dspine_export.errors import UsageError
from dspine_export.runtime.generation import FinishReason, Settings
from dspine_export.runtime.statistics import AcceptanceStatistics

Message = Mapping[str, str]


@dataclass(frozen=True)
class Request:
    """One generation. Exactly one of `text`, `messages` and `token_ids` is the prompt.

    Attributes:
        text: continued as it is or, with `chat`, sent as a user's message. messages: a chat, [{"role", "content"}, ...].
        max_tokens: most new tokens; None for the engine's default.
        temperature, top_p: 0 is greedy. seed: of this request's own random numbers, 0 .. 2**64 - 1: its tokens do not depend on what
            else is running.
        stop_words: texts that end the output, which ends before them.
        num_draft_tokens: drafted per round, 0 .. B-1; None for B-1; 0 does without speculation.
        deadline_seconds: from submission; None for the engine's default.
    """

    text: str | None = None
    messages: Sequence[Message] | None = None
    token_ids: Sequence[int] | None = None
    chat: bool = False
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_words: Sequence[str] = ()
    ignore_eos: bool = False
    num_draft_tokens: int | None = None
    deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        if sum(prompt is not None for prompt in (self.text, self.messages, self.token_ids)) != 1:
            raise UsageError("A request needs exactly one prompt", expected="one of text, messages and token ids")
        Settings(1, self.temperature, self.top_p)  # checks the two
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "0 .. 2**64 - 1")
        _require(all(self.stop_words), "stop_words", list(self.stop_words), "texts that are not empty")
        if self.num_draft_tokens is not None:
            _require(self.num_draft_tokens >= 0, "num_draft_tokens", self.num_draft_tokens, "at least 0")
        if self.deadline_seconds is not None:
            _require(self.deadline_seconds > 0, "deadline", self.deadline_seconds, "seconds, above 0")


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text: all of it, special tokens and the stop word left out. token_ids: new tokens, the end token included.
        finish_reason: "stop" at an end token or stop word, "length" at a limit.
        statistics: acceptance counters of this request alone.
        near_ties: greedy tokens at which the target's two best logits lay within `tolerance.NEAR_TIE`, where they were counted.
        queue_seconds, first_token_seconds, seconds: from submission to a slot, to the first token, to the end.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    statistics: AcceptanceStatistics = field(default_factory=AcceptanceStatistics)
    near_ties: int = 0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seconds: float = 0.0


def _require(valid: bool, name: str, got: object, expected: str) -> None:
    if not valid:
        raise UsageError("Invalid request", where=name, got=got, expected=expected)
