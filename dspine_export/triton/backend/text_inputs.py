"""One request of the text model: from numpy arrays as Triton hands them over to a validated `Request`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspine_export.errors import UsageError
from dspine_export.runtime.serving.request import Request
from dspine_export.triton.contract import (
    ALIASES,
    DEADLINE_PARAMETER,
    REQUEST_PARAMETERS,
    SERVER_PARAMETERS,
    SERVER_PREFIX,
    TEXT_INPUTS,
)

Array = NDArray[Any]
Read = Callable[[str], Array | None]  # an input by its name, None where the request leaves it out


@dataclass(frozen=True)
class TextRequest:
    """What was asked for, and whether piece by piece."""

    request: Request
    stream: bool


def parse_request(
    read: Read, parameters: str, timeout_us: int, max_prompt_bytes: int, *, strict: bool = True
) -> TextRequest:
    """Validates one request.

    Args:
        parameters: the request's parameters, a JSON object. timeout_us: Triton's own timeout, 0 for none.
        max_prompt_bytes: of the messages, before they are parsed; the engine checks the text itself.
        strict: refuse parameters that nothing reads.

    Raises:
        UsageError: whatever is wrong, and where.
    """
    given: dict[str, Any] = json.loads(parameters or "{}")
    if strict:
        _check_parameters(given)
    messages = _messages(read, max_prompt_bytes)
    stop_words = read("stop_words")
    request = Request(
        text=_one(read, "text_input", _text),
        messages=messages,
        token_ids=_ids(read("input_ids")),
        chat=bool(_one(read, "chat", bool)),
        max_tokens=_one(read, "max_tokens", int),
        temperature=_one(read, "temperature", float) or 0.0,
        top_p=_default(_one(read, "top_p", float), 1.0),
        seed=_one(read, "random_seed", int) or 0,
        stop_words=() if stop_words is None else tuple(_text(word, "stop_words") for word in stop_words.flatten()),
        num_draft_tokens=_one(read, "num_draft_tokens", int),
        ignore_eos=bool(_one(read, "ignore_eos", bool)),
        deadline_seconds=_deadline(given, timeout_us),
    )
    return TextRequest(request, bool(_one(read, "stream", bool)))


def _one(read: Read, name: str, convert: Callable[..., Any]) -> Any:
    """The single value of an input; None where it is left out."""
    array = read(name)
    if array is None:
        return None
    if array.size != 1:
        expected = "one value: a request holds one prompt, and the server batches requests itself"
        raise UsageError("An input has the wrong shape", where=name, got=list(array.shape), expected=expected)
    value = array.reshape(-1)[0]
    return _text(value, name) if convert is _text else convert(value)


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _text(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes | np.bytes_):
        raise UsageError("An input has the wrong type", where=name, got=type(value).__name__, expected="a string")
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        got = f"byte 0x{value[error.start]:02x} at {error.start}: {error.reason}"
        raise UsageError("Text that is not valid UTF-8", where=name, got=got) from error


def _ids(array: Array | None) -> list[int] | None:
    if array is None:
        return None
    if array.dtype.kind not in "iu":
        raise UsageError("An input has the wrong type", where="input_ids", got=array.dtype, expected="integers")
    ids: list[int] = array.reshape(-1).tolist()
    return ids


def _messages(read: Read, max_bytes: int) -> list[dict[str, str]] | None:
    text = _one(read, "messages", _text)
    if text is None:
        return None
    if len(text) > max_bytes:
        expected = f"at most {max_bytes} bytes"
        raise UsageError("The prompt is too long", where="messages", got=f"{len(text)} characters", expected=expected)
    expected = '[{"role": "user", "content": "..."}, ...]'
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError("Not valid JSON", where="messages", got=str(error)[:200], expected=expected) from error
    valid = isinstance(messages, list) and bool(messages) and all(_is_message(message) for message in messages)
    if not valid:
        raise UsageError("Not a chat", where="messages", got=text[:200], expected=expected)
    return list(messages)


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and {"role", "content"} <= message.keys()
        and all(isinstance(text, str) for text in message.values())
    )


def _check_parameters(given: Iterable[str]) -> None:
    """At `/generate` every field that names no input becomes a parameter: a misspelt input would be ignored in silence.

    Raises:
        UsageError: a parameter that nothing reads, with what was probably meant.
    """
    inputs, own = [tensor.name for tensor in TEXT_INPUTS], [parameter.name for parameter in REQUEST_PARAMETERS]
    for name in given:
        if name in own or name in SERVER_PARAMETERS or name.startswith(SERVER_PREFIX):
            continue
        close = [ALIASES[name]] if name in ALIASES else difflib.get_close_matches(name, [*inputs, *own], n=1)
        fix = f"did you mean {close[0]!r}?" if close else None
        if name in inputs:
            fix = "send it as an input: at /generate beside text_input, elsewhere among the inputs"
        expected = ", ".join((*inputs, *own, "timeout"))
        raise UsageError("Nothing reads this field or parameter", where=name[:100], expected=expected, fix=fix)


def _deadline(given: dict[str, Any], timeout_us: int) -> float | None:
    """Seconds from now: the soonest of the request's parameter and Triton's timeout, which `/generate` passes on as a parameter."""
    wanted = _seconds(DEADLINE_PARAMETER, given.get(DEADLINE_PARAMETER), 1e3, "milliseconds")
    passed = _seconds("timeout", given.get("timeout") or None, 1e6, "microseconds")  # 0 is Triton's word for none
    known = [limit for limit in (wanted, passed, timeout_us / 1e6 or None) if limit is not None]
    return min(known) if known else None


def _seconds(name: str, value: Any, per_second: float, unit: str) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value) / per_second
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UsageError("Invalid request parameter", where=name, got=value, expected=f"{unit}, above 0")
    return seconds
