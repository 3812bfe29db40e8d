"""From a request to a stream: prompt encoded, everything checked, in the caller's thread."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspine_export.errors import UsageError
from dspine_export.runtime.generation import RunningSequence
from dspine_export.runtime.prompts import encode_messages, encode_prompt
from dspine_export.runtime.serving.draws import Draws
from dspine_export.runtime.serving.handle import Handle
from dspine_export.runtime.serving.output_text import OutputText
from dspine_export.runtime.serving.request import Request
from dspine_export.runtime.serving.stream import Stream


@dataclass(frozen=True)
class Limits:
    """What requests may ask for.

    Attributes:
        max_seq_len: tokens of prompt and output together; a longer output is cut, a prompt that leaves no room is refused.
        max_prompt_bytes: of text or messages, checked before they are tokenised.
        default_max_tokens, default_deadline_seconds: of requests that do not say; the latter None for no deadline.
    """

    max_seq_len: int = 2048
    max_prompt_bytes: int = 1 << 18
    max_stop_words: int = 16
    default_max_tokens: int = 256
    default_deadline_seconds: float | None = None


class Admission:
    """Makes streams.

    Args:
        tokenizer: None serves token ids only.
        vocab_size: rows of the target's embedding. block_size: B, 1 without a drafter.
        drafts_for: most drafted tokens behind a prompt of so many tokens.
        eos_ids: tokens that end a sequence.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        limits: Limits,
        *,
        vocab_size: int,
        block_size: int,
        drafts_for: Callable[[int], int],
        eos_ids: frozenset[int],
    ) -> None:
        self.limits = limits
        self._tokenizer, self._decoding_tokenizer = tokenizer, copy.deepcopy(tokenizer)
        self._vocab_size, self._block_size, self._drafts_for = vocab_size, block_size, drafts_for
        self._eos_ids = eos_ids
        # A tokenizer may not encode in two threads at once, nor decode meanwhile: hence the lock, and the copy above.
        self._lock = threading.Lock()

    def stream(self, request: Request, handle: Handle) -> Stream:
        """A stream ready to wait for a slot. Raises UsageError for anything the request gets wrong."""
        self._check(request)
        now = time.monotonic()
        seconds = request.deadline_seconds or self.limits.default_deadline_seconds
        prompt = self._prompt(request)
        limit = min(request.max_tokens or self.limits.default_max_tokens, self.limits.max_seq_len - len(prompt))
        wanted = self._block_size - 1 if request.num_draft_tokens is None else request.num_draft_tokens
        return Stream(
            handle=handle,
            prompt=prompt,
            sequence=RunningSequence(0, len(prompt), limit, frozenset() if request.ignore_eos else self._eos_ids),
            output=OutputText(self._decoding_tokenizer, request.stop_words),
            draws=Draws(request.seed, self._block_size, greedy=request.temperature == 0),
            temperature=request.temperature,
            top_p=request.top_p,
            draft_tokens=min(wanted, self._drafts_for(len(prompt))),
            submitted_at=now,
            expires_at=None if seconds is None else now + seconds,
        )

    def _check(self, request: Request) -> None:
        if len(request.stop_words) > self.limits.max_stop_words:
            expected = f"at most {self.limits.max_stop_words}"
            raise UsageError("Too many stop words", got=len(request.stop_words), expected=expected)
        if request.stop_words and self._tokenizer is None:
            raise UsageError("Stop words need a tokenizer", fix="serve the target with its tokenizer's files")
        drafts = request.num_draft_tokens
        if drafts is not None and drafts >= self._block_size > 1:
            expected = f"0 .. {self._block_size - 1} (the drafter's block holds {self._block_size} tokens)"
            raise UsageError("Too many draft tokens", where="num_draft_tokens", got=drafts, expected=expected)

    def _prompt(self, request: Request) -> list[int]:
        if request.token_ids is not None:
            ids = list(request.token_ids)
            outside = [token for token in ids if not 0 <= token < self._vocab_size]
            if outside:
                expected = f"0 .. {self._vocab_size - 1}"
                raise UsageError("Prompt token outside the target's vocabulary", got=outside[0], expected=expected)
        else:
            ids = self._encoded(request)
        most = self.limits.max_seq_len - 1
        if not ids or len(ids) > most:
            what = "The prompt is too long" if ids else "The prompt is empty"
            fix = "shorten it, or serve with a larger max_seq_len" if ids else None
            raise UsageError(what, got=f"{len(ids)} tokens", expected=f"1 .. {most} tokens", fix=fix)
        return ids

    def _encoded(self, request: Request) -> list[int]:
        messages = request.messages
        size = _bytes([request.text or ""] if messages is None else [text for m in messages for text in m.values()])
        if size > self.limits.max_prompt_bytes:
            expected = f"at most {self.limits.max_prompt_bytes} bytes"
            raise UsageError("The prompt is too long", got=f"{size} bytes", expected=expected)
        if self._tokenizer is None:
            raise UsageError("The target has no tokenizer", fix="send token ids")
        with self._lock:
            if messages is not None:
                return encode_messages(self._tokenizer, messages)
            return encode_prompt(self._tokenizer, request.text or "", chat=request.chat)


def _bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)
