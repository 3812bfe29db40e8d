"""Prometheus metrics of the text model: what is exported, and how an engine's counters become it.

Triton's custom metrics live in the server's process and every update is a message to it, so the engine counts for itself and the
differences are passed on a few times a second. That also holds for the histogram: its buckets are counters named as Prometheus names
the series of a histogram, ``_bucket{le=}``, ``_sum`` and ``_count``, which `histogram_quantile` reads like any other. A native histogram
would need one message per sequence and round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["COUNTER", "GAUGE"]
HISTOGRAM = "dspine_accepted_length"


@dataclass(frozen=True)
class Metric:
    """One family; every series of it carries the labels `model` and `version`, a gauge `process` too, and `labels` besides.

    `process` is the instance's name: counters of a model's instances add up in one series, gauges would overwrite each other.
    """

    name: str
    kind: Kind
    doc: str
    labels: tuple[str, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("dspine_requests_total", "COUNTER", "Requests by outcome", ("outcome",)),
    Metric("dspine_prompt_tokens_total", "COUNTER", "Prompt tokens processed"),
    Metric("dspine_generated_tokens_total", "COUNTER", "Tokens generated"),
    Metric("dspine_rounds_total", "COUNTER", "Draft-verify rounds over a batch"),
    Metric("dspine_sequence_rounds_total", "COUNTER", "Draft-verify rounds, one per sequence of the batch"),
    Metric("dspine_drafted_tokens_total", "COUNTER", "Drafted tokens checked by the target"),
    Metric("dspine_accepted_tokens_total", "COUNTER", "Drafted tokens that the target kept"),
    Metric("dspine_model_seconds_total", "COUNTER", "Seconds in the models", ("section",)),
    Metric("dspine_serving_seconds_total", "COUNTER", "Seconds of the loop outside the models"),
    Metric(f"{HISTOGRAM}_bucket", "COUNTER", "Sequence rounds that committed at most le tokens", ("le",)),
    Metric(f"{HISTOGRAM}_sum", "COUNTER", "Tokens committed by all sequence rounds"),
    Metric(f"{HISTOGRAM}_count", "COUNTER", "Sequence rounds"),
    Metric("dspine_queue_depth", "GAUGE", "Requests waiting for a slot"),
    Metric("dspine_slots_in_use", "GAUGE", "Sequences being generated"),
    Metric("dspine_slots", "GAUGE", "Sequences that can be generated at once"),
    Metric("dspine_healthy", "GAUGE", "1 while the engine can serve, 0 once it has failed"),
)

Series = dict[tuple[str, str], float]  # (family, value of its own label or "") -> value


def series_of(snapshot: Mapping[str, Any], block_size: int) -> Series:
    """Every series' value from an engine's snapshot. Buckets are 1 .. B and +Inf, whatever has been seen so far."""
    series: Series = {("dspine_requests_total", label): count for label, count in snapshot["requests"].items()}
    for name in (
        "prompt_tokens",
        "generated_tokens",
        "rounds",
        "sequence_rounds",
        "drafted_tokens",
        "accepted_tokens",
        "serving_seconds",
    ):
        series[f"dspine_{name}_total", ""] = snapshot[name]
    for section, seconds in snapshot["model_seconds"].items():
        series["dspine_model_seconds_total", section] = seconds
    lengths = snapshot["accepted_lengths"]
    for length in range(1, block_size + 1):
        series[f"{HISTOGRAM}_bucket", str(length)] = sum(lengths[: length + 1])
    series[f"{HISTOGRAM}_bucket", "+Inf"] = series[f"{HISTOGRAM}_count", ""] = sum(lengths)
    series[f"{HISTOGRAM}_sum", ""] = sum(length * count for length, count in enumerate(lengths))
    for name in ("queue_depth", "slots_in_use", "slots", "healthy"):
        series[f"dspine_{name}", ""] = float(snapshot[name])
    return series


class MetricsExporter:
    """Passes differences on to Triton. The families are held here: Triton drops one as soon as its object is gone.

    Args:
        pb_utils: Triton's module. model, version: labels of every series. process: of the gauges.
    """

    def __init__(self, pb_utils: Any, model: str, version: str, process: str, block_size: int) -> None:
        self._block_size, self._shown = block_size, dict[tuple[str, str], float]()
        self._kinds = {metric.name: metric for metric in METRICS}
        family = pb_utils.MetricFamily
        self._families = {
            metric.name: family(name=metric.name, description=metric.doc, kind=getattr(family, metric.kind))
            for metric in METRICS
        }
        self._labels, self._process = {"model": model, "version": version}, {"process": process}
        self._metrics: dict[tuple[str, str], Any] = {}

    def update(self, snapshot: Mapping[str, Any]) -> None:
        """Brings every exported series up to an engine's snapshot."""
        for key, value in series_of(snapshot, self._block_size).items():
            before = self._shown.get(key)
            if value == before:
                continue
            metric = self._metric(key)
            if self._kinds[key[0]].kind == "GAUGE":
                metric.set(value)
            elif value > (before or 0):
                metric.increment(value - (before or 0))
            self._shown[key] = value

    def _metric(self, key: tuple[str, str]) -> Any:
        if key not in self._metrics:
            name, own = key
            kind = self._kinds[name]
            labels = self._labels | dict(zip(kind.labels, [own], strict=False))
            labels |= self._process if kind.kind == "GAUGE" else {}
            self._metrics[key] = self._families[name].Metric(labels=labels)
        return self._metrics[key]
