"""Stream one answer from the server: ``python client.py 'Write a haiku about rivers.'``. Needs nothing but Python.

Over gRPC the same tensors travel with ``tritonclient``; see the README beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 600  # a client without one waits for ever for a server process that has died


def stream(url: str, model: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The server-sent events of ``/generate_stream``, each one response of the model."""
    call = urllib.request.Request(
        f"{url}/v2/models/{model}/generate_stream",
        data=json.dumps({**request, "stream": True}).encode(),
        headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
    )
    with urllib.request.urlopen(call, timeout=TIMEOUT_S) as answer:
        for line in answer:
            if line.startswith(b"data:"):
                event: dict[str, Any] = json.loads(line[len(b"data:") :])
                if "error" in event:
                    raise RuntimeError(event["error"])
                yield event


def main() -> int:
    """Print the answer as it comes, then what speculation gained."""
    parser = argparse.ArgumentParser(description="Stream one answer from a DSpine model on Triton Inference Server.")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="dspine")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    options = parser.parse_args()
    request = {
        "text_input": options.prompt,
        "chat": not options.raw,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
    }
    last: dict[str, Any] = {}
    try:
        for last in stream(options.url, options.model, request):
            print(last.get("text_output", ""), end="", flush=True)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace").strip().removeprefix("data:")
        print(f"refused: {json.loads(text).get('error', text)}", file=sys.stderr)
        return 1
    except (OSError, RuntimeError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    summary = {key: value for key, value in last.items() if key not in ("text_output", "output_ids", "model_name")}
    print(f"\n{json.dumps(summary)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
