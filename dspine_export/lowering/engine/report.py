"""What a build produced: ``build.json``, and the object the rest of the program reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspine_export.lowering.engine.inspect import EngineSummary, NetworkSummary
from dspine_export.lowering.engine.profile import InputProfile

REPORT_NAME = "build.json"


@dataclass(frozen=True)
class PlanReport:
    """One plan file.

    Attributes:
        entry: ``context`` or ``draft``.
        path: the file's name inside the engine folder.
        size_bytes, sha256: of the plan.
        onnx_sha256: of the .onnx file it was built from (external weights are hashed where they are copied).
        weight_bytes: of the graph's initialisers.
        seconds: parsing and building.
        peak_rss_bytes: of this process during this build, mapped weights included.
        network: layers and bindings of the parsed network.
        engine: layers of the built engine, as the builder lists them after fusion.
        plan_plugins: plugin records found in the plan file.
        profiles: shapes of every input.
        warnings: the builder's.
    """

    entry: str
    path: str
    size_bytes: int
    sha256: str
    onnx_sha256: str
    weight_bytes: int
    seconds: float
    peak_rss_bytes: int
    network: NetworkSummary
    engine: EngineSummary
    plan_plugins: tuple[str, ...]
    profiles: tuple[InputProfile, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class EngineReport:
    """One engine folder: a plan belongs to one builder, one version and the listed GPUs.

    Attributes:
        folder: holds the plans and ``build.json``.
        builder, version: what built it, and what must run it.
        sm: label of the target GPUs, last part of the folder's name.
        compute_capabilities: the same in words, ``8.0+`` for every supported one from 8.0 on.
        profile: the user's ranges.
        plans: in the order they were built.
        warnings: facts the user should see.
    """

    folder: Path
    builder: str
    version: str
    sm: str
    compute_capabilities: tuple[str, ...]
    profile: dict[str, dict[str, int]]
    plans: tuple[PlanReport, ...]
    warnings: tuple[str, ...]

    def plan(self, entry: str) -> Path:
        """Path of one entry's plan."""
        return self.folder / next(plan.path for plan in self.plans if plan.entry == entry)

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, without the folder: the directory may be moved."""
        data = asdict(self)
        del data["folder"]
        return data

    def write(self, folder: Path) -> None:
        """Write ``build.json`` into ``folder``."""
        (folder / REPORT_NAME).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
