"""Grafana dashboard of a served model."""

from __future__ import annotations

from typing import Any

from dspine_export.triton.options import RepositoryOptions


def dashboard(options: RepositoryOptions) -> dict[str, Any]:
    """The dashboard's JSON model."""
    return {"title": f"DSpine: {options.name}"}
