"""From committed tokens to text that may be shown: detokenised without broken characters, cut before stop words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspine_export.runtime.prompts import StreamDecoder
from dspine_export.runtime.serving.stop_text import StopText


class OutputText:
    """One request's text. Without a tokenizer there is none, and stop words cannot be asked for."""

    def __init__(self, tokenizer: Any | None, stop_words: Sequence[str]) -> None:
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._stop = StopText(stop_words) if stop_words else None
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All that was returned so far."""
        return "".join(self._shown)

    def push(self, tokens: Sequence[int]) -> tuple[int, str]:
        """How many of the tokens belong to the output (fewer only where a stop word is completed), and the text now certain."""
        if self._decoder is None:
            return len(tokens), ""
        if self._stop is None:
            return len(tokens), self._show(self._decoder.push(tokens))
        # One by one, so that where the output ends does not depend on how the tokens were grouped into rounds.
        shown = []
        for count, token in enumerate(tokens, 1):
            shown.append(self._stop.push(self._decoder.push([token])))
            if self._stop.found:
                return count, self._show("".join(shown))
        return len(tokens), self._show("".join(shown))

    @property
    def stopped(self) -> bool:
        """Whether a stop word has appeared."""
        return self._stop is not None and self._stop.found

    def finish(self) -> str:
        """What was held back and belongs to the output."""
        if self._decoder is None or self.stopped:
            return ""
        rest = self._decoder.finish()
        if self._stop is not None:
            rest = self._stop.push(rest)
            rest += "" if self._stop.found else self._stop.finish()
        return self._show(rest)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text
