"""Whether the model really answers: one token, with a deadline. Exit 0 if it does, 1 if not. Needs nothing but Python.

Triton can go on calling a streaming model ready after its backend process has died, so a health endpoint alone proves nothing. A busy
server passes: the question carries a deadline, and only a process that works can say that it was missed.

``--reload`` unloads and loads a model whose process is gone, which starts a new one (for servers with explicit model control, as
``launch.sh`` starts them); it leaves a process alone that is merely slow.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request

DEAD = (
    "is not healthy",
    "engine has failed",
)  # Triton's words for a backend process that has ended, and the backend's own
BUSY = ("overloaded", "deadline")


def post(url: str, body: dict[str, object], timeout_s: float) -> str:
    """The answer's text.

    Raises:
        OSError: no answer in time, or an answer that is an error.
    """
    call = urllib.request.Request(url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=timeout_s) as answer:
        return str(answer.read().decode(errors="replace"))


def problem(url: str, model: str, timeout_s: float) -> str | None:
    """None where the model answers, else why it does not."""
    deadline_ms = int(max(timeout_s - 2, timeout_s / 2) * 1000)
    request: dict[str, object] = {"text_input": "a", "max_tokens": 1, "num_draft_tokens": 0, "deadline_ms": deadline_ms}
    try:
        post(f"{url}/v2/models/{model}/generate_stream", request, timeout_s)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace").strip()
        return None if any(word in text.lower() for word in BUSY) else text
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    """Probe, and with ``--reload`` repair."""
    parser = argparse.ArgumentParser(description="Ask a DSpine model on Triton Inference Server for one token.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="dspine")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds")
    parser.add_argument("--reload", action="store_true", help="unload and load a model whose process is gone")
    options = parser.parse_args()
    found = problem(options.url, options.model, options.timeout)
    if found is None:
        return 0
    print(f"{options.model} does not answer: {found}", file=sys.stderr)
    if not options.reload or not any(words in found for words in DEAD):
        return 1
    for action in ("unload", "load"):
        try:
            post(f"{options.url}/v2/repository/models/{options.model}/{action}", {}, 600.0)
        except OSError as error:
            print(f"{action} failed: {error}", file=sys.stderr)
            return 1
    found = problem(options.url, options.model, options.timeout)
    print(
        f"{options.model} was loaded again{'' if found is None else f' and still does not answer: {found}'}",
        file=sys.stderr,
    )
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main())
