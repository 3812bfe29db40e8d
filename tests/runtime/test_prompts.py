"""Chat rendering and streamed text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspine_export.errors import CheckpointError, UsageError
from dspine_export.runtime.prompts import StreamDecoder, encode_prompt, load_tokenizer
from tests.runtime.pairs import Pair

TEXT = "naïve 世界 🙂👩‍👩‍👧 done"


@pytest.fixture(scope="module")
def tokenizer(tiny_pair: Pair) -> Any:
    return load_tokenizer(tiny_pair.target)


def test_stream_never_shows_half_a_character(tokenizer: Any) -> None:
    ids = encode_prompt(tokenizer, TEXT, chat=False)
    assert len(ids) == len(TEXT.encode()), "one token a byte"
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push([token]) for token in ids]
    assert "\ufffd" not in "".join(pieces) and "".join(pieces) + decoder.finish() == TEXT
    assert max(len(piece) for piece in pieces) == 1


@pytest.mark.parametrize("size", [2, 3, 7, 100])
def test_stream_in_blocks(tokenizer: Any, size: int) -> None:
    ids = encode_prompt(tokenizer, TEXT, chat=False)
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    assert "".join(pieces) + decoder.finish() == TEXT


def test_unfinished_character_comes_out_at_the_end(tokenizer: Any) -> None:
    ids = encode_prompt(tokenizer, "a🙂", chat=False)[:-1]
    decoder = StreamDecoder(tokenizer)
    assert decoder.push(ids) == "" or decoder.push([]) == ""
    assert decoder.finish().startswith("a\ufffd")
    assert decoder.finish() == ""


def test_end_token_is_not_shown(tokenizer: Any) -> None:
    decoder = StreamDecoder(tokenizer)
    ids = [*encode_prompt(tokenizer, "ok", chat=False), 256]
    assert decoder.push(ids) + decoder.finish() == "ok"


def test_chat_template(tokenizer: Any) -> None:
    ids = encode_prompt(tokenizer, "hi", system="be brief")
    assert tokenizer.decode(ids) == "system: be brief<end>user: hi<end>assistant: "
    assert ids.count(256) == 2


def test_refusals(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        load_tokenizer(tmp_path)

    with pytest.raises(UsageError, match="UTF-8"):
        encode_prompt(tokenizer, "bytes \udcff")

    class Bare:
        chat_template = None

    with pytest.raises(UsageError, match="no chat template"):
        encode_prompt(Bare(), "hi")

    class Angry:
        chat_template = "x"

        def apply_chat_template(self, *_: object, **__: object) -> str:
            raise ValueError("system role not supported")

    with pytest.raises(UsageError, match="refuses"):
        encode_prompt(Angry(), "hi", system="s")
