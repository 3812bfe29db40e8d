"""Stop words and characters that straddle tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine_export.errors import UsageError
from dspine_export.runtime.serving.handle import Piece
from dspine_export.runtime.serving.output_text import OutputText
from dspine_export.runtime.serving.request import Request
from dspine_export.runtime.serving.stop_text import StopText
from tests.serving.conftest import Serve


@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4), st.lists(st.integers(0, 30), max_size=8))
def test_output_ends_before_the_stop_word(text: str, word: str, cuts: list[int]) -> None:
    stop, shown = StopText([word]), ""
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in pairwise(edges):
        shown += stop.push(text[start:end])
        want = text.partition(word)[0]
        assert want.startswith(shown)
        assert not any(text[:end].endswith(word[:n]) and shown == text[:end] for n in range(1, len(word)))
    assert shown + stop.finish() == text.partition(word)[0] and stop.found == (word in text)


def test_first_of_several_stop_words() -> None:
    stop = StopText(["abcd", "bc"])
    assert stop.push("xa") == "x" and stop.push("b") == "" and stop.push("c") == "a"
    assert stop.found and stop.push("more") == "" and stop.finish() == ""


def test_tokens_behind_a_stop_word_do_not_count(tokenizer: Any) -> None:
    """However the tokens are grouped."""
    ids = tokenizer("hello END world")["input_ids"]
    for size in (1, 2, 5, len(ids)):
        output, count = OutputText(tokenizer, ["END"]), 0
        for start in range(0, len(ids), size):
            kept, _ = output.push(ids[start : start + size])
            count += kept
            if output.stopped:
                break
        assert output.text + output.finish() == "hello " and count == len("hello END")


def test_held_text_comes_out_at_the_end(tokenizer: Any) -> None:
    output = OutputText(tokenizer, ["END"])
    ids = tokenizer("the EN🙂")["input_ids"]
    assert output.push(ids[:6])[1] == "the "
    assert output.push(ids[6:-1])[1] == ""  # three quarters of a character
    assert output.push(ids[-1:])[1] == "EN🙂"
    assert OutputText(tokenizer, ["END"]).push(ids[:6])[1] + "EN" == "the EN"


@pytest.mark.parametrize("seed", range(3))
def test_streamed_pieces_are_the_text(serve: Serve, tokenizer: Any, seed: int) -> None:
    engine = serve()
    request = Request(text="é", max_tokens=40, temperature=1.5, seed=seed, ignore_eos=True)
    events = list(engine.submit(request).events(60))
    completion = events[-1].completion  # type: ignore[union-attr]
    assert "".join(event.text for event in events) == completion.text  # type: ignore[union-attr]
    assert [t for event in events for t in event.token_ids] == completion.token_ids  # type: ignore[union-attr]
    assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert all(event.text for event in events[:-1]) and all(isinstance(event, Piece) for event in events[:-1])


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("drafts", [None, 0, 1])
def test_a_stop_word_ends_a_stream(serve: Serve, drafts: int | None) -> None:
    engine = serve()
    ask = {"text": "x", "max_tokens": 60, "temperature": 1.2, "seed": 3, "ignore_eos": True, "num_draft_tokens": drafts}
    free = engine.submit(Request(**ask)).result(60)
    letters = [index for index, c in enumerate(free.text) if c.isascii() and c.isprintable()]
    word = free.text[letters[4] :][:2]
    events = list(engine.submit(Request(**ask, stop_words=[word, "never there"])).events(60))
    completion = events[-1].completion  # type: ignore[union-attr]
    assert completion.finish_reason == "stop"
    assert "".join(event.text for event in events) == completion.text  # type: ignore[union-attr]
    assert completion.text == free.text[: free.text.index(word)]
    assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
    assert completion.statistics.committed_tokens == len(completion.token_ids) - 1


def test_stop_words_need_a_tokenizer(serve: Serve) -> None:
    engine = serve(text=False)
    with pytest.raises(UsageError, match="tokenizer"):
        engine.submit(Request(token_ids=[1], stop_words=["a"]))
    with pytest.raises(UsageError, match="no tokenizer"):
        engine.submit(Request(text="a"))
