"""What the tests ask a running server, and how they read its metrics."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .server import Server

_SERIES = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Answer:
    """Status, text, and the text's JSON where it is one."""

    status: int
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text.strip().removeprefix("data:"))


def post(server: Server, path: str, body: Any, *, timeout: float = 120.0) -> Answer:
    """POST ``body``, bytes as they are and anything else as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"http://{server.http}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(call, timeout=timeout) as answer:
            return Answer(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode())


def generate(server: Server, body: Any, *, model: str = "dspine", timeout: float = 120.0) -> Answer:
    """One response with everything."""
    return post(server, f"/v2/models/{model}/generate", body, timeout=timeout)


def load(server: Server, model: str) -> Answer:
    return post(server, f"/v2/repository/models/{model}/load", {})


def unload(server: Server, model: str) -> Answer:
    return post(server, f"/v2/repository/models/{model}/unload", {})


Metrics = dict[str, list[tuple[dict[str, str], float]]]


def metrics(server: Server) -> Metrics:
    """Every exported series by family: labels and value."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: Metrics = {}
    for series in _SERIES.finditer(text):
        labels = dict(_LABEL.findall(series["labels"] or ""))
        found.setdefault(series["name"], []).append((labels, float(series["value"])))
    return found


def value(found: Metrics, name: str, model: str = "dspine", **labels: str) -> float:
    """The sum of a model's series of one family that carry ``labels``."""
    wanted = {"model": model, **labels}.items()
    return sum(number for own, number in found.get(name, []) if wanted <= own.items())


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether ``condition`` becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
