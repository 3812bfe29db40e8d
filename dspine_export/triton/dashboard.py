"""Grafana dashboard of a served model. Its queries use the metrics of `backend.metrics` and Triton's own, nothing else.

The backend's accepted-length histogram is made of counters, so `histogram_quantile` and rates work on it as on any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine_export.triton.backend.metrics import HISTOGRAM
from dspine_export.triton.options import RepositoryOptions

_SERIES = '{model="$model"}'
_WINDOW = "[$__rate_interval]"
_COLUMNS, _HEIGHT = 24, 8


@dataclass(frozen=True)
class _Panel:
    """One panel; `queries` are pairs of an expression and its legend."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    doc: str = ""


def _rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{_SERIES}{_WINDOW}))"


def _now(name: str) -> str:
    return f"sum ({name}{_SERIES})"


def _panels() -> tuple[_Panel, ...]:
    bucket = _rate(f"{HISTOGRAM}_bucket", "le")
    model_seconds, serving = _rate("dspine_model_seconds_total"), _rate("dspine_serving_seconds_total")
    return (
        _Panel("Healthy instances", ((_now("dspine_healthy"), "healthy"),), kind="stat", width=4),
        _Panel(
            "Slots",
            (
                (_now("dspine_slots_in_use"), "in use"),
                (_now("dspine_slots"), "all"),
                (_now("dspine_queue_depth"), "queue"),
            ),
            width=10,
            doc="A queue that stays above 0 with all slots in use: add slots, instances or replicas.",
        ),
        _Panel("Requests by outcome", ((_rate("dspine_requests_total", "outcome"), "{{outcome}}"),), "reqps", width=10),
        _Panel(
            "Tokens",
            ((_rate("dspine_generated_tokens_total"), "generated"), (_rate("dspine_prompt_tokens_total"), "prompt")),
            "tok/s",
        ),
        _Panel(
            "Acceptance length (tau)",
            ((f"{_rate(f'{HISTOGRAM}_sum')} / {_rate(f'{HISTOGRAM}_count')}", "tokens per target call"),),
            doc="Tokens committed per target call, bonus token included; 1 means that nothing drafted is kept.",
        ),
        _Panel(
            "Acceptance rate",
            (
                (
                    f"{_rate('dspine_accepted_tokens_total')} / {_rate('dspine_drafted_tokens_total')}",
                    "accepted / drafted",
                ),
            ),
            "percentunit",
        ),
        _Panel(
            "Accepted length, quantiles",
            tuple((f"histogram_quantile({q}, {bucket})", f"p{round(q * 100)}") for q in (0.1, 0.5, 0.9)),
        ),
        _Panel("Accepted length", ((bucket, "{{le}}"),), kind="heatmap"),
        _Panel(
            "Batch of a round",
            ((f"{_rate('dspine_sequence_rounds_total')} / {_rate('dspine_rounds_total')}", "sequences"),),
        ),
        _Panel("Model time", ((_rate("dspine_model_seconds_total", "section"), "{{section}}"),), "percentunit"),
        _Panel(
            "Serving overhead",
            ((f"{serving} / ({serving} + {model_seconds})", "share outside the models"),),
            "percentunit",
        ),
        _Panel("Requests inside Triton", ((_now("nv_inference_pending_request_count"), "pending"),)),
        _Panel("Refused by Triton", ((_rate("nv_inference_request_failure", "reason"), "{{reason}}"),), "reqps"),
        _Panel("Host", (("max (nv_cpu_utilization)", "CPU"),), "percentunit"),
        _Panel("GPU", (("max by (gpu_uuid) (nv_gpu_utilization)", "{{gpu_uuid}}"),), "percentunit"),
    )


def dashboard(options: RepositoryOptions) -> dict[str, Any]:
    """The dashboard's JSON model, for Grafana's import; it asks for the Prometheus data source."""
    return {
        "title": f"DSpine: {options.name}",
        "uid": "dspine-triton",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["dspine", "triton"],
        "templating": {"list": [_datasource_variable(), _model_variable(options.name)]},
        "panels": _placed(_panels()),
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _model_variable(name: str) -> dict[str, Any]:
    return {
        "name": "model",
        "type": "query",
        "label": "Model",
        "datasource": _source(),
        "query": "label_values(dspine_healthy, model)",
        "current": {"text": name, "value": name},
        "refresh": 2,
    }


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _placed(panels: tuple[_Panel, ...]) -> list[dict[str, Any]]:
    """Left to right, then down."""
    placed, x, y = [], 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > _COLUMNS:
            x, y = 0, y + _HEIGHT
        placed.append(_panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": _HEIGHT}))
        x += panel.width
    return placed


def _panel(number: int, panel: _Panel, place: dict[str, int]) -> dict[str, Any]:
    heatmap = {"format": "heatmap"} if panel.kind == "heatmap" else {}
    return {
        "id": number,
        "title": panel.title,
        "description": panel.doc,
        "type": panel.kind,
        "gridPos": place,
        "datasource": _source(),
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend, **heatmap}
            for i, (expression, legend) in enumerate(panel.queries)
        ],
    }
