"""Text in, text out: the target's chat template, and detokenisation of a stream without broken characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspine_export.errors import CheckpointError, DependencyError, UsageError

_REPLACEMENT = "\ufffd"  # what a byte-level tokenizer decodes an unfinished character to


def load_tokenizer(path: Path) -> Any:
    """The target's tokenizer, from local files and without code from the directory.

    Raises:
        CheckpointError: the directory holds none that transformers can load. DependencyError: no transformers.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        fix = "pip install 'transformers>=5.0'"
        raise DependencyError("Reading a tokenizer needs transformers", got=str(error), fix=fix) from error
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers has no error type of its own
        got = f"{type(error).__name__}: {error}"[:400]
        fix = "pass token ids, or add tokenizer.json and tokenizer_config.json"
        raise CheckpointError("The target has no usable tokenizer", where=path, got=got, fix=fix) from error


def encode_prompt(tokenizer: Any, text: str, *, chat: bool = True, system: str | None = None) -> list[int]:
    """Token ids of a user message in the target's chat template, up to where the assistant answers; of the bare text without `chat`.

    Raises:
        UsageError: a chat was asked for and the tokenizer has no template, the template refuses the messages, or the text
            is not Unicode.
    """
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        return encode_messages(tokenizer, [*messages, {"role": "user", "content": text}])
    _check_unicode(text)
    return list(tokenizer(text)["input_ids"])


def encode_messages(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Token ids of a chat [{"role", "content"}, ..] in the target's template, up to where the assistant answers. Raises as above."""
    for message in messages:
        _check_unicode("".join(message.values()))
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("The target has no chat template", fix="use --raw to continue the text as it is")
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program and raises what it likes
        raise UsageError(
            "The chat template refuses this prompt", got=f"{type(error).__name__}: {error}"[:300]
        ) from error
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])  # the template writes them itself


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of the command line that were no UTF-8
        raise UsageError("The prompt is not valid UTF-8", got=ascii(text)[:100]) from error


class StreamDecoder:
    """Turns token ids into text piece by piece; the pieces joined are the text of all ids together.

    A character may be spread over several tokens, and a tokenizer may write a token differently after another one. So each piece is the
    difference between two decodings that start a few tokens back, and it is held while its end is an unfinished character.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids: list[int] = []
        self._context, self._shown = 0, 0  # decoding starts at _context; ids before _shown are on screen

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain with these ids, possibly empty."""
        self._ids += ids
        return self._advance(final=False)

    def finish(self) -> str:
        """What was still held back."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        shown = self._decode(self._ids[self._context : self._shown])
        text = self._decode(self._ids[self._context :])
        if not final and (text.endswith(_REPLACEMENT) or len(text) <= len(shown)):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text[len(shown) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False))
