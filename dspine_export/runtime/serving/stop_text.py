"""Stop words in streamed text: the output ends before the first one, and no text that may be the start of one is shown."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Looks for stop words in text that arrives piece by piece; they may straddle pieces.

    The pieces returned, joined, are the text before the first stop word. Of stop words completed by the same piece the one that starts
    first counts.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._longest = max(map(len, self._words), default=0)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that can be shown now; nothing more once `found`."""
        if self.found:
            return ""
        text, self._held = self._held + text, ""
        starts = [start for word in self._words if (start := text.find(word)) >= 0]
        if starts:
            self.found = True
            return text[: min(starts)]
        held = self._possible_start(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and turned out to start no stop word."""
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop word."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(word.startswith(text[-length:]) for word in self._words):
                return length
        return 0
