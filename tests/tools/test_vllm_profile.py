"""A trace of three decoding steps, taken apart."""

from __future__ import annotations

from typing import Any

from tools.vllm_profile import steps_of


def _step(start: float, launch: int) -> list[dict[str, Any]]:
    def event(cat: str, name: str, at: float, dur: float, correlation: int) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": start + at, "dur": dur, "args": {"correlation": correlation}}

    return [
        event("cuda_runtime", "cudaGraphLaunch", -5, 1, launch),
        event("kernel", "gemm", 0, 40, launch),
        event("kernel", "gemm", 40, 40, launch),
        event("kernel", "norm", 82, 8, launch),
        event("cuda_runtime", "cudaLaunchKernel", -2, 1, launch + 1),
        event("kernel", "sample", 93, 5, launch + 1),
        event("cuda_driver", "cuGraphLaunch", -1, 1, launch + 2),
        event("kernel", "draft", 98, 10, launch + 2),
        event("gpu_memcpy", "Memcpy DtoH", 100, 2, launch + 3),
        event("user_annotation", "step", 0, 120, launch),
    ]


def test_steps_are_cut_at_the_longest_graph() -> None:
    trace = [event for start, launch in ((0, 10), (120, 20), (240, 30), (360, 40)) for event in _step(start, launch)]
    found = steps_of(reversed(trace))
    assert found["steps"] == "3 of 3"
    assert found["step_us"] == 120
    assert [one["name"] for one in found["launches"]] == ["graph of 3", "sample", "graph of 1", "Memcpy DtoH"]
    assert [one["us"] for one in found["launches"]] == [90, 5, 10, 2]
    assert [one.get("idle_before_us") for one in found["launches"]] == [None, 3, 0, 0]
    assert found["idle_at_the_end_us"] == 12  # behind the graph, which outlasts the copy
    assert found["inside"] == {"graph of 3": {"gemm": [80, 2], "norm": [8, 1]}, "graph of 1": {"draft": [10, 1]}}


def test_graphs_of_as_many_kernels_are_told_apart() -> None:
    def event(cat: str, name: str, start: float, correlation: int | None) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": start, "dur": 10, "args": {} if correlation is None else {"correlation": correlation}}

    trace = [event("cuda_runtime", "cudaGraphLaunch", 0, None)]
    for step in range(4):
        start = 100.0 * step
        for launch, name, at in ((2 * step, "target", 0), (2 * step + 1, "draft", 60)):
            trace += [event("cuda_runtime", "cudaGraphLaunch", start + at, launch), event("kernel", name, start + at, launch)]
        trace[-3]["dur"] = 50
    trace.append({"cat": "kernel", "name": "stray", "ts": 1000, "dur": 1})
    found = steps_of(trace)
    assert (found["steps"], found["step_us"]) == ("3 of 3", 100)
    assert found["inside"] == {"graph of 1": {"target": [50, 1]}, "graph of 1, 2": {"draft": [10, 1]}}


def test_a_trace_without_graphs_says_so() -> None:
    assert steps_of([{"cat": "kernel", "name": "k", "ts": 0, "dur": 1, "args": {}}]) == {"steps": "0 of 0"}
