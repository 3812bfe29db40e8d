"""Where a decoding step of an engine in this process goes on the GPU: its CUDA graphs, the launches between them, and what lies idle."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ON_THE_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
NAME_LENGTH = 60


@dataclass
class Unit:
    """One launch: a kernel, a copy, or a whole CUDA graph. Microseconds; parts: kernels of a graph as (name, duration)."""

    name: str
    start: float
    end: float
    parts: list[tuple[str, float]] = field(default_factory=list)

    @property
    def duration(self) -> float:
        return self.end - self.start


def profile_steps(llm: Any, prompts: list[Any], max_tokens: int) -> dict[str, Any]:
    """Generates under torch's profiler. Returns `steps_of` its trace."""
    from torch.profiler import ProfilerActivity, profile

    from tools.vllm_engine import timed_batch

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        timed_batch(llm, prompts, max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(trace))
        return steps_of(json.loads(trace.read_text())["traceEvents"])


def units_of(events: Iterable[dict[str, Any]]) -> list[Unit]:
    """Launches by their start, the kernels of a CUDA graph together."""
    events = list(events)
    replays = {
        event.get("args", {}).get("correlation")
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "GraphLaunch" in event["name"]
    }
    units: list[Unit] = []
    graphs: dict[int, Unit] = {}
    for event in sorted((one for one in events if one.get("cat") in ON_THE_DEVICE), key=lambda one: float(one["ts"])):
        name, start = event["name"][:NAME_LENGTH], float(event["ts"])
        end, launch = start + float(event["dur"]), event.get("args", {}).get("correlation")
        if launch is None or launch not in replays:
            units.append(Unit(name, start, end))
            continue
        if launch not in graphs:
            graphs[launch] = Unit("", start, end)
            units.append(graphs[launch])
        graphs[launch].end = max(graphs[launch].end, end)
        graphs[launch].parts.append((name, end - start))
    alike: dict[int, list[list[str]]] = {}
    for graph in graphs.values():
        kernels = [name for name, _ in graph.parts]
        others = alike.setdefault(len(kernels), [])
        if kernels not in others:
            others.append(kernels)
        place = others.index(kernels)
        graph.name = f"graph of {len(kernels)}" + (f", {place + 1}" if place else "")
    return units


def steps_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The most frequent step, from one start of the graph that takes the most time in all to the next: of an engine whose target is one
    graph.

    Returns:
        steps: how many were like it, of how many; step_us: medians over them, as of launches: name, microseconds and those idle before it,
        in order; inside: of one of them, by graph, microseconds and number of its kernels by name.
    """
    units = units_of(events)
    spent: Counter[str] = Counter()
    for unit in units:
        if unit.parts:
            spent[unit.name] += round(unit.duration)
    if not spent:
        return {"steps": "0 of 0"}
    longest = spent.most_common(1)[0][0]
    starts = [index for index, unit in enumerate(units) if unit.name == longest]
    steps = [units[begin : end + 1] for begin, end in pairwise(starts)]
    kinds = Counter(tuple(unit.name for unit in step) for step in steps)
    if not kinds:
        return {"steps": "0 of 0"}
    kind = kinds.most_common(1)[0][0]
    alike = [step for step in steps if tuple(unit.name for unit in step) == kind]
    launches = []
    for position, name in enumerate(kind[:-1]):
        found = {"name": name, "us": median(step[position].duration for step in alike)}
        if position:
            found["idle_before_us"] = median(
                max(0.0, step[position].start - max(unit.end for unit in step[:position])) for step in alike
            )
        launches.append({key: round(value, 1) if isinstance(value, float) else value for key, value in found.items()})
    idle = [max(0.0, step[-1].start - max(unit.end for unit in step[:-1])) for step in alike]
    return {
        "steps": f"{len(alike)} of {len(steps)}",
        "step_us": round(median(step[-1].start - step[0].start for step in alike), 1),
        "launches": launches,
        "idle_at_the_end_us": round(median(idle), 1),
        "inside": {unit.name: _by_name(unit) for unit in alike[len(alike) // 2][:-1] if unit.parts},
    }


def _by_name(graph: Unit) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name, duration in graph.parts:
        one = found.setdefault(name, [0.0, 0])
        one[0], one[1] = round(one[0] + duration, 1), one[1] + 1
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))
